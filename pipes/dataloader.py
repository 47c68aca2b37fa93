"""The drop-in `DataLoader`: torch's, iterated by `execute`'s machinery.

What a user sets up is torch's own: the constructor with its checks, the attributes, the samplers and `len` are
inherited. What differs is who iterates. A map-style data set is the pipeline `indices -> fetch`, whose indices the
consumer draws and deals to the workers in rotation; an iterable-style one is a replica in each of as many shards as
there are workers. Laws: for one torch seed the batches, their types and the workers' draws are torch's; the state at
any moment is that of the batch received last, whatever was drawn ahead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils import pin_memory as pinning
from torch.utils.data.dataloader import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from pipes.context import Cursor
from pipes.drop_in import generators
from pipes.drop_in.indices import Drawn, drawn_from
from pipes.drop_in.processes import Worker, in_torchs_words, start_method
from pipes.drop_in.progress import Progress, check, is_iterable
from pipes.drop_in.replicas import (
    Batches,
    Ended,
    Failure,
    Indices,
    Replica,
    Setup,
    WithState,
    escaped,
    fetch,
    is_stateful,
    replicate,
)
from pipes.errors import WorkerError
from pipes.execution.dealing import Options
from pipes.execution.loader import Loader, Start
from pipes.execution.state import Position
from pipes.pipeline import pipe

_pin: Callable[[Any, str | None], Any] = pinning.pin_memory


class DataLoader[T](TorchDataLoader[T]):
    """Load data as `torch.utils.data.DataLoader` does: the same arguments, the same batches in the same order.

    >>> import torch
    >>> rows = [(float(i), "row") for i in range(5)]
    >>> loader = DataLoader(rows, batch_size=2, drop_last=True)
    >>> [x.tolist() for x, _ in loader]
    [[0.0, 1.0], [2.0, 3.0]]

    Several times faster with workers; any function may be passed to them, under any start method; a worker that dies
    is replaced. `state_dict` and `load_state_dict` stop and go on in the middle of an epoch; with a map-style data set
    any number of workers may go on. A `StopIteration` out of `__getitem__` or `collate_fn` is an error.
    """

    _progress: Progress | None = None
    _loaded: dict[str, Any] | None = None

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return super()._get_iterator()
        if self.num_workers:
            self.check_worker_number_rationality()
        iterator = _Iterator(self, self._loaded)
        self._loaded = None
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return where the user stands, for a loader of the same data, samplers and batch size to go on from.

        At any moment, and it tells what was received, not what was loaded ahead. It goes through JSON if the states of
        the data set and the sampler do, which are in it if they have `state_dict` and `load_state_dict`.
        """
        self._check_has_states()
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        return (self._progress or Progress()).saved(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter` go on from a state."""
        self._check_has_states()
        check(self, state)
        self._iterator, self._progress, self._loaded = None, None, copy.deepcopy(state)

    def _check_has_states(self) -> None:
        if not self.in_order:
            raise RuntimeError("a loader with in_order=False has no state: what was received is no prefix")
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            raise RuntimeError("a loader of a DataPipe has no state, since torch itself iterates it; pass a data set")


class _Iterator(_BaseDataLoaderIter):
    """One epoch, or with persistent workers one after the other: torch's iterator, with batches from a `Loader`."""

    _dataset: Any
    _base_seed: int
    _broken: BaseException | None = None

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
        kept = between is not None and loader.persistent_workers and between["base_seed"] is not None
        if between is not None and kept:
            self._base_seed = between["base_seed"]  # which is drawn once, before the first epoch
            self._restore(loader, between)
        if self._num_workers:
            super()._reset(loader)  # asks the sampler again, as torch does with workers
        self._indices = Drawn(loader)
        if state is not None and between is None:
            self._go_on(loader, state)
        else:
            progress = Progress(running=True, first=not kept, base_seed=self._base_seed, generators=begun)
            progress.datasets = between["datasets"] if between is not None and loader.persistent_workers else []
            self._load(loader, progress)
            # the state of a data set may be that of the generator that the order is drawn from: draw it first
            self._begin(loader, self._sampler_iter, ahead=int(is_stateful(self._dataset)))
        if not self._num_workers:
            self._open()

    @staticmethod
    def _restore(loader: DataLoader[Any], state: dict[str, Any]) -> None:
        """Make things as they were between two epochs."""
        dataset: Any = loader.dataset
        if not loader.num_workers and state["datasets"] and state["datasets"][0] is not None:
            dataset.load_state_dict(copy.deepcopy(state["datasets"][0]))
        if state["sampler"] is not None:
            drawn_from(loader)[0].load_state_dict(copy.deepcopy(state["sampler"]))
        generators.restore(loader, state["generators"])

    def _load(self, loader: DataLoader[Any], progress: Progress) -> None:
        progress.datasets = progress.datasets or [None] * max(1, self._num_workers)
        self._progress = progress
        self._loader = _executed(loader, self._indices, progress)

    def _go_on(self, loader: DataLoader[Any], state: dict[str, Any]) -> None:
        """Draw the epoch's order again, with the generators as the epoch found them, up to what was received."""
        sampler, *_ = drawn_from(loader)
        if generators.is_torchs(sampler):
            next(iter(sampler), None)  # the program's generators move on as at the beginning of any epoch
        progress = Progress.loaded(state)
        if all(of_dataset is None for of_dataset in progress.datasets):
            progress.datasets = []  # perhaps as many as there were other workers
        self._load(loader, progress)
        self._base_seed, self._num_yielded = state["base_seed"], state["batches"]
        with generators.as_then(loader, state["generators"]):
            items = iter(self._index_sampler)
            if state["first"]:
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the base seed
                items = iter(self._index_sampler) if state["num_workers"] else items  # asked again, see above
            self._begin(loader, items, ahead=1)  # the order is drawn now, under these generators

    def _begin(self, loader: DataLoader[Any], items: Iterator[Any], ahead: int = 0) -> None:
        """Start a run: the workers, the sampler behind what was received, and indices to keep the workers busy."""
        cursor = self._progress.cursor
        if not is_iterable(loader):
            ahead = max(ahead, self._num_workers * (loader.prefetch_factor or 0))
            if cursor is None and (begun := self._indices.beginning()) is not None:
                self._progress.cursor = ((begun, 0), 0)
            self._indices.start(items, cursor and cursor[0][0], ahead)
        loader._progress, self._broken = self._progress, None
        self._loader._go_on(Position(self._loader.epoch, cursor))
        self._batches = iter(self._loader)

    def _open(self) -> None:
        """Open the data set here, at once, as torch does without workers."""
        if (state := self._progress.datasets[0]) is not None:
            self._dataset.load_state_dict(copy.deepcopy(state))
        if self._dataset_kind == _DatasetKind.Iterable:
            next(self._batches)
            self._progress.cursor = self._loader._position[1]
        elif is_stateful(self._dataset):
            self._progress.datasets[0] = copy.deepcopy(self._dataset.state_dict())

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        begun = generators.states(loader)
        super()._reset(loader, first_iter)
        self._progress = Progress(
            running=True,
            first=False,
            base_seed=self._base_seed,
            generators=begun,
            datasets=self._progress.datasets,  # the very list: successors of dead workers are told of it
        )
        self._begin(loader, self._sampler_iter)

    def _next_data(self) -> Any:
        if self._broken is not None:  # never a StopIteration, which would look like the end
            raise RuntimeError(
                f"this epoch was broken off by {type(self._broken).__name__}: begin anew, or go on from state_dict()"
            ) from self._broken
        batch = self._received()
        if isinstance(batch, Failure):
            raise batch.error
        return self._pinned(batch) if self._pin_memory else batch

    def _pinned(self, batch: Any) -> Any:
        try:
            return _pin(batch, self._pin_memory_device)
        except StopIteration as error:
            raise escaped(error, "in pin_memory") from error

    def _received(self) -> Any:
        while True:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._progress.running = False
                raise
            except (WorkerError, KeyboardInterrupt) as error:
                self._broken = in_torchs_words(error, self._timeout)
                raise self._broken from (None if self._broken is error else error)
            cursor = self._progress.cursor = self._loader._position[1]
            if isinstance(batch, Ended):
                self._progress.datasets[self._worker_of(cursor)] = batch.state
                continue
            self._progress.batches += 1
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
    def _workers(self) -> list[Worker]:
        """The workers as processes, under the name that torch's iterator has for them."""
        return [Worker(child) for child in self._loader._children]


def _executed(loader: DataLoader[Any], indices: Drawn, progress: Progress) -> Loader:
    """Return the pipeline of a loader, ready to run."""
    dataset, workers = loader.dataset, loader.num_workers
    replica = Replica(dataset, loader.collate_fn, loader._auto_collation, loader.batch_size, loader.drop_last)
    if not is_iterable(loader):
        pipeline = pipe(Indices(indices.pairs), fetch(replica))
    else:
        pipeline = pipe(Batches(replica), *([replicate(workers)] if workers else []))
    setup = Setup(dataset, workers, progress.base_seed or 0, loader.worker_init_fn) if workers else None
    options = Options(
        loader.prefetch_factor or 1,
        ordered=loader.in_order,
        timeout=loader.timeout or None,
        most_in_a_task=1,
        window=1,
        rotate=loader.in_order or is_iterable(loader),
    )
    method, state_of = start_method(loader.multiprocessing_context), progress.datasets.__getitem__
    start = Start(workers, "process", method, setup, options.restarts, state_of)
    return Loader(pipeline, start, options, persistent=loader.persistent_workers)
