"""The drop-in `DataLoader`: torch's, iterated by `execute`'s machinery.

What a user sets up is torch's own: the constructor with its checks, the attributes, the samplers and `len` are
inherited. What differs is who iterates. A map-style data set is the pipeline `indices -> fetch`, whose indices the
consumer draws and deals to the workers in rotation; an iterable-style one is a replica in each of as many shards as
there are workers. Laws: for one torch seed the batches, their types and the workers' draws are torch's; the state at
any moment is that of the batch received last, whatever was drawn ahead.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterDataPipe, MapDataPipe
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from pipes import generators
from pipes.context import Cursor, Pair
from pipes.errors import WorkerTimeoutError
from pipes.execution.dealing import Options
from pipes.execution.launch import METHODS
from pipes.execution.loader import Loader, Start
from pipes.execution.state import Position
from pipes.execution.waiting import readable
from pipes.pipeline import pipe
from pipes.replicas import (
    ENDED,
    Batches,
    Ended,
    Failure,
    Indices,
    Replica,
    Setup,
    WithState,
    fetch,
    is_stateful,
    replicate,
    taken,
)

VERSION = 1
RESTARTS = 3


class DataLoader[T](TorchDataLoader[T]):
    """Load data as `torch.utils.data.DataLoader` does: the same arguments, the same batches in the same order.

    >>> import torch
    >>> rows = [(float(i), "row") for i in range(5)]
    >>> loader = DataLoader(rows, batch_size=2, drop_last=True)
    >>> [x.tolist() for x, _ in loader]
    [[0.0, 1.0], [2.0, 3.0]]

    Several times faster with workers; any function may be passed to them, under any start method; a worker that dies
    is replaced. `state_dict` and `load_state_dict` stop and go on in the middle of an epoch; with a map-style data set
    any number of workers may go on. A `StopIteration` of a data set or of `collate_fn` is an error, and never the end.
    """

    _progress: _Progress | None = None
    _loaded: dict[str, Any] | None = None

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return super()._get_iterator()
        if self.num_workers:
            self.check_worker_number_rationality()
        state, self._loaded = self._loaded, None
        return _Iterator(self, state)

    def state_dict(self) -> dict[str, Any]:
        """Return where the user stands, for a loader of the same data, samplers and batch size to go on from.

        At any moment, and it tells what was received, not what was loaded ahead. It goes through JSON if the states of
        the data set and the sampler do, which are in it if they have `state_dict` and `load_state_dict`.
        """
        if not self.in_order:
            raise RuntimeError("a loader with in_order=False has no state: what was received is no prefix")
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        return (self._progress or _Progress()).saved(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter` go on from a state."""
        if not self.in_order:
            raise RuntimeError("a loader with in_order=False cannot go on from a state; leave in_order out")
        _check(self, state)
        self._iterator, self._progress, self._loaded = None, None, copy.deepcopy(state)


@dataclass
class _Progress:
    """Where the user stands, apart from the iterator: a loop that was left by `break` must not keep workers alive."""

    running: bool = False
    first: bool = True  # the epoch that the base seed was drawn in: persistent workers keep theirs
    batches: int = 0
    cursor: Cursor = None
    base_seed: int | None = None
    generators: dict[str, Any] | None = None
    datasets: list[Any] = field(default_factory=list)

    def saved(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the state: it holds the generators as the epoch found them, and between two epochs as they are."""
        state: dict[str, Any] = {"version": VERSION, "of": _described(loader), "num_workers": loader.num_workers}
        state |= {
            "running": self.running,
            "first": self.first,
            "batches": self.batches,
            "cursor": self.cursor,
            "base_seed": self.base_seed,
        }
        state["generators"] = self.generators if self.running else generators.states(loader)
        state["datasets"] = self.datasets
        return copy.deepcopy(state)


def _described(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a loader must share with the one that its state is of."""
    sampler = type(loader._index_sampler if loader.batch_size is None else loader.sampler).__name__
    length = len(loader.dataset) if hasattr(loader.dataset, "__len__") and not _is_iterable(loader) else None  # type: ignore[arg-type]
    data = {"dataset": type(loader.dataset).__qualname__, "length": length, "sampler": sampler}
    return data | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}


def _is_iterable(loader: DataLoader[Any]) -> bool:
    return bool(loader._dataset_kind == _DatasetKind.Iterable)  # type: ignore[attr-defined]


def _check(loader: DataLoader[Any], state: Any) -> None:
    keys = {
        "version",
        "of",
        "num_workers",
        "running",
        "first",
        "batches",
        "cursor",
        "base_seed",
        "generators",
        "datasets",
    }
    if not isinstance(state, dict) or not keys <= state.keys():
        raise ValueError(
            f"a state must be what state_dict() returned, got {type(state).__name__} without all of {keys}"
        )
    if state["version"] != VERSION:
        raise ValueError(f"a state must be of version {VERSION}, got {state['version']!r}")
    for what, ours in _described(loader).items():
        if (theirs := state["of"].get(what)) != ours:
            raise ValueError(
                f"a state must be loaded into a loader as it was saved from: {what} {ours!r}, got {theirs!r}"
            )
    bound = (_is_iterable(loader) and state["running"]) or any(s is not None for s in state["datasets"])
    if bound and state["num_workers"] != loader.num_workers:
        raise ValueError(
            f"each worker of an iterable-style data set, or of one with a state, has a place of its own in it: "
            f"`num_workers` must be {state['num_workers']}, as it was, got {loader.num_workers}"
        )


class _Iterator(_BaseDataLoaderIter):
    """One epoch, or with persistent workers one after the other: torch's iterator, with batches from a `Loader`."""

    def __init__(self, loader: DataLoader[Any], state: dict[str, Any] | None) -> None:
        if loader.timeout and not loader.num_workers:
            raise AssertionError(f"`timeout` needs workers to wait for, got {loader.timeout} with num_workers=0")
        if loader.num_workers and not loader.prefetch_factor:
            raise AssertionError(f"`prefetch_factor` must be > 0 with workers, got {loader.prefetch_factor}")
        between = state if state is not None and not state["running"] else None
        if between is not None:
            self._restore(loader, between)
        begun = generators.states(loader)
        super().__init__(loader)
        if between is not None and loader.persistent_workers and between["base_seed"] is not None:
            self._base_seed = between["base_seed"]  # which is drawn once, before the first epoch
            self._restore(loader, between)
        if self._num_workers:
            super()._reset(loader)  # asks the sampler again, as torch does with workers
        self._indices = _Drawn(loader)
        if state is not None and between is None:
            self._go_on(loader, state)
        else:
            datasets = between["datasets"] if between is not None and loader.persistent_workers else []
            self._load(loader, _Progress(True, base_seed=self._base_seed, generators=begun, datasets=datasets))
            self._begin(loader, self._sampler_iter)
        if not self._num_workers:
            self._open()

    @staticmethod
    def _restore(loader: DataLoader[Any], state: dict[str, Any]) -> None:
        """Make things as they were between two epochs."""
        if not loader.num_workers and state["datasets"] and state["datasets"][0] is not None:
            loader.dataset.load_state_dict(copy.deepcopy(state["datasets"][0]))  # type: ignore[attr-defined]  # it gave it
        generators.restore(loader, state["generators"])

    def _load(self, loader: DataLoader[Any], progress: _Progress) -> None:
        progress.datasets = progress.datasets or [None] * max(1, self._num_workers)
        self._progress = progress
        self._loader = _executed(loader, self._indices, progress)

    def _go_on(self, loader: DataLoader[Any], state: dict[str, Any]) -> None:
        """Draw the epoch's order again, with the generators as the epoch found them, up to what was received."""
        if generators.is_torchs(loader.sampler):
            next(iter(loader.sampler), None)  # the program's generators move on as at the beginning of any epoch
        names = ("first", "base_seed", "batches", "cursor", "generators", "datasets")
        self._load(loader, _Progress(True, **{name: state[name] for name in names}))
        self._base_seed, self._num_yielded = state["base_seed"], state["batches"]
        with generators.as_then(loader, state["generators"]):
            items = iter(self._index_sampler)
            if state["first"]:
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the base seed
                items = iter(self._index_sampler) if self._num_workers else items
            self._begin(loader, items)

    def _begin(self, loader: DataLoader[Any], items: Iterator[Any]) -> None:
        """Start a run: the workers, the sampler behind what was received, and indices to keep the workers busy."""
        cursor = self._progress.cursor
        if not _is_iterable(loader):
            ahead = self._num_workers * (loader.prefetch_factor or 0) or (cursor is not None)
            self._indices.start(items, cursor and cursor[0][0], ahead)
        loader._progress = self._progress
        self._loader.go_on(Position(self._loader.epoch, cursor))
        self._batches = iter(self._loader)

    def _open(self) -> None:
        """Open the data set here, at once, as torch does without workers."""
        if (state := self._progress.datasets[0]) is not None:
            self._dataset.load_state_dict(copy.deepcopy(state))
        if self._dataset_kind == _DatasetKind.Iterable:
            next(self._batches)
            self._progress.cursor = self._loader.position.cursor
        elif is_stateful(self._dataset):
            self._progress.datasets[0] = copy.deepcopy(self._dataset.state_dict())

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        begun = generators.states(loader)
        super()._reset(loader, first_iter)
        self._progress = _Progress(
            True, False, base_seed=self._base_seed, generators=begun, datasets=list(self._progress.datasets)
        )
        self._begin(loader, self._sampler_iter)

    def _next_data(self) -> Any:
        try:
            batch = self._received()
        except StopIteration:
            self._progress.running = False
            raise
        except WorkerTimeoutError as error:
            message = f"DataLoader timed out after {self._timeout} seconds: {error}"
            raise WorkerTimeoutError(message) from error
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _received(self) -> Any:
        while True:
            batch = next(self._batches)
            cursor = self._progress.cursor = self._loader.position.cursor
            if isinstance(batch, Ended):
                self._progress.datasets[self._worker_of(cursor)] = batch.state
                continue
            self._progress.batches += 1
            if isinstance(batch, Failure):
                raise batch.error
            if isinstance(batch, WithState):
                self._progress.datasets[self._worker_of(cursor)] = batch.state
                return batch.batch
            return batch

    def _worker_of(self, cursor: Cursor) -> int:
        """Return whose batch came with a cursor: that of a merge tells whose turn is next, that of a head its unit."""
        if not self._num_workers:
            return 0
        behind: int = cursor[0] if self._dataset_kind == _DatasetKind.Iterable else cursor[0][1]
        return (behind - 1) % self._num_workers

    @property
    def _workers(self) -> list[_Worker]:
        """The workers as processes, under the name that torch's iterator has for them."""
        return [] if self._loader.pool is None else [_Worker(pid) for pid in self._loader.pool.pids]


class _Worker:
    """A worker process, in the words of `multiprocessing.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._has_ended(timeout)

    def is_alive(self) -> bool:
        """Tell whether it lives."""
        return not self._has_ended(0)

    def _has_ended(self, timeout: float | None) -> bool:
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            return bool(readable([fd], timeout))
        finally:
            os.close(fd)


class _Drawn:
    """The indices of an epoch, some of them drawn ahead, each with the number and the sampler's states behind it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        plain = type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None
        self._sampler = loader.sampler if plain else loader._index_sampler
        self._size = loader.batch_size if plain else None
        self._least = self._size if loader.drop_last else 1
        self._ahead: deque[Pair] = deque()
        self._failure: Exception | None = None

    def start(self, items: Iterator[Any], upstream: Cursor, ahead: int) -> None:
        """Begin an epoch behind what was received, and draw some indices ahead: now, as torch does."""
        self._given, of_sampler, of_items = upstream or (0, None, None)
        self._ahead, self._failure = deque(), None
        if of_sampler is not None:
            self._sampler.load_state_dict(of_sampler)  # type: ignore[union-attr]  # it gave that state
        self._items = iter(self._sampler) if self._size is not None or of_sampler is not None else items
        if of_items is not None:
            self._items.load_state_dict(of_items)  # type: ignore[attr-defined]  # it gave that state
        if of_sampler is None and of_items is None:
            for _ in range(self._given):
                taken(self._items, self._size or 1)
        try:
            self._ahead.extend(itertools.islice(self._draw(), ahead))
        except Exception as error:  # noqa: BLE001  # raised behind what was drawn before it
            self._failure = error

    def pairs(self, _: Cursor) -> Iterator[Pair]:
        """Yield indices from where `start` began."""
        while self._ahead:
            yield self._ahead.popleft()
        if self._failure is not None:
            raise self._failure
        yield from self._draw()

    def _draw(self) -> Iterator[Pair]:
        while (index := self._next()) is not ENDED:
            self._given += 1
            states = (copy.deepcopy(x.state_dict()) if is_stateful(x) else None for x in (self._sampler, self._items))
            yield index, (self._given, *states)

    def _next(self) -> Any:
        if self._size is None:
            return next(self._items, ENDED)
        indices = taken(self._items, self._size)
        return ENDED if len(indices) < (self._least or 1) else indices


def _executed(loader: DataLoader[Any], indices: _Drawn, progress: _Progress) -> Loader:
    """Return the pipeline of a loader, ready to run."""
    dataset, workers = loader.dataset, loader.num_workers
    replica = Replica(dataset, loader.collate_fn, loader._auto_collation, loader.batch_size, loader.drop_last)
    if not _is_iterable(loader):
        pipeline = pipe(Indices(indices.pairs), fetch(replica))
    else:
        pipeline = pipe(Batches(replica), *([replicate(workers)] if workers else []))
    seed, states = progress.base_seed or 0, tuple(progress.datasets)
    setup = Setup(dataset, workers, seed, loader.worker_init_fn, states) if workers else None
    options = Options(
        loader.prefetch_factor or 1,
        ordered=loader.in_order,
        timeout=loader.timeout or None,
        restarts=RESTARTS,
        rotate=loader.in_order,
    )
    start = Start(workers, "process", _start_method(loader.multiprocessing_context), setup, RESTARTS)
    return Loader(pipeline, start, options, persistent=loader.persistent_workers)


def _start_method(context: Any) -> str:
    """Return the method of a context, by default that of `multiprocessing`; a foreign one is a clean interpreter."""
    if context is not None:
        name = context.get_start_method()
    else:
        name = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return name if name in METHODS else "spawn"
