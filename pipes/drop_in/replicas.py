"""What a `DataLoader` has its workers do, in torch's own terms: seeds, worker info, fetching and collating.

Laws: for one base seed a worker's draws, its `get_worker_info()` and its batches are those of torch's worker of that
number; whatever user code raises becomes an element, so that the iteration can go on behind it; a `StopIteration` out
of `__getitem__` or `collate_fn` is an error and never the end of an epoch.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from pipes.collating import DTYPE, SHAPE, Empty
from pipes.columns import columns_of, gather
from pipes.context import Context, Cursor, Pair
from pipes.errors import StageError
from pipes.execution import wire
from pipes.nodes import Node, Positions, Stepping
from pipes.sharding import shard_by_worker
from pipes.stage import Elementwise, Origins, Source, Upstream
from pipes.values import value


class Failure:
    """An exception as an element; a `StopIteration`, which would end the epoch, as an error that says so."""

    def __init__(self, error: Exception, where: str) -> None:
        self.error: BaseException = escaped(error, where) if isinstance(error, StopIteration) else error
        if (worker := torch_worker.get_worker_info()) is not None:
            lines = "".join(traceback.format_exception(self.error))
            told = f"DataLoader worker process {worker.id} (pid {os.getpid()})"
            self.error.add_note(f"pipes: caught in {told}, where the traceback was\n{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _failure, (wire.pack_error(self.error),)


def _failure(packed: bytes) -> Failure:
    failure = Failure.__new__(Failure)
    failure.error = wire.unpack_error(packed)
    return failure


@dataclass(frozen=True)
class WithState:
    """A batch, and the state of the worker's data set behind it."""

    batch: Any
    state: Any


BEGUN, ENDED = object(), object()


@dataclass(frozen=True)
class Replica:
    """A data set and how its samples become batches. `size` is None without batching."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    size: int | None = None
    drop_last: bool = False

    def fetched(self, index: Any) -> Any:
        """Return the batch (or the sample) of a map-style data set at the indices (or the index)."""
        try:
            if not self.batched:
                batch = self.collate_fn(self.dataset[index])
            elif self.collate_fn is default_collate and (columns := _gathered(self.dataset, index)) is not None:
                batch = columns
            else:
                batch = self.collate_fn(self._samples(index))
        except Exception as error:  # noqa: BLE001  # the iterator raises it
            return Failure(error, f"for index {index!r}")
        return WithState(batch, copy.deepcopy(self.dataset.state_dict())) if is_stateful(self.dataset) else batch

    def _samples(self, indices: Any) -> Any:
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        dataset = self.dataset
        return [dataset[i] for i in indices]

    def drawn(self, items: Iterator[Any]) -> tuple[Any, bool]:
        """Return an iterable-style data set's next batch, or `ENDED`, and whether the items are known to be over."""
        over = False
        try:
            samples = next_of(items, self.size, drop_last=self.drop_last)
            over = samples is ENDED or (self.size is not None and len(samples) < self.size)
            return (ENDED if samples is ENDED else self.collate_fn(samples)), over
        except Exception as error:  # noqa: BLE001  # the iterator raises it
            return Failure(error, "in collate_fn"), over  # an iterator's own StopIteration is its end

    def passed_over(self, items: Iterator[Any], batches: int, failed: Sequence[int]) -> None:
        """Draw batches that were received before; those of `failed` raised, and may raise again."""
        for k in range(batches):
            drawn = 0
            try:
                drawn = len(taken(items, self.size or 1))
            except Exception:
                if k not in failed:  # else the user has had it
                    raise
            if drawn < (self.size or 1) and k not in failed:
                raise StageError(
                    f"the data set must give again the {batches} batches received of it, got its end in batch {k}; "
                    "begin the epoch anew, or give its iterator state_dict and load_state_dict"
                )


def next_of(items: Iterator[Any], size: int | None, *, drop_last: bool) -> Any:
    """Return the next item, or the next `size` of them in a list; `ENDED` where there is none."""
    if size is None:
        return next(items, ENDED)
    out = taken(items, size)
    return ENDED if len(out) < (size if drop_last else 1) else out


def taken(items: Iterator[Any], size: int) -> list[Any]:
    """Return the next `size` items, fewer at the end; asks `next` alone, since a user's `__iter__` may begin anew."""
    if type(items).__module__ == "builtins":  # a generator, say, where that is no question, and a fifth of the time
        return list(itertools.islice(items, size))
    out: list[Any] = []
    while len(out) < size and (x := next(items, ENDED)) is not ENDED:
        out.append(x)
    return out


def escaped(error: StopIteration, where: str) -> StageError:
    """Word the error for a `StopIteration` that would end an epoch."""
    worded = StageError(
        f"StopIteration was raised {where}, which would end the epoch early without a word; "
        "catch it there, and raise IndexError or return a value"
    )
    worded.__cause__ = error
    return worded


def is_stateful(x: Any) -> bool:
    """Whether `x` follows torchdata's protocol."""
    return callable(getattr(x, "state_dict", None)) and callable(getattr(x, "load_state_dict", None))


def _gathered(dataset: Any, indices: Any) -> list[Any] | None:
    """Return what collating these rows of a `TensorDataset` gives, with one gather per column."""
    columns = columns_of(dataset) if isinstance(dataset, TensorDataset) else None
    if columns is None or type(indices) is not list or not _rules_are_torchs():
        return None
    if any(array.layout is not torch.strided for array in columns.arrays):
        return None
    positions: Any = np.asarray(indices)
    if positions.dtype != np.int64 or positions.ndim != 1 or not positions.size or positions.min() < 0:
        return None
    return [gather(array, positions) for array in columns.arrays]


def _rules_are_torchs() -> bool:
    """Whether nobody has changed how `default_collate` treats tuples and tensors."""
    rules: dict[Any, Any] = torch_collate.default_collate_fn_map
    of_tensors = rules.get(torch.Tensor)
    untouched = of_tensors is torch_collate.collate_tensor_fn or _is_ours(of_tensors)
    return untouched and not any(issubclass(tuple, cls) for cls in rules)


# -- map-style data sets: the consumer draws indices, and a worker fetches ---------------------------------------------


@value
class Indices(Source):
    """What a sampler gives, as the iterator draws it: never leaves the consumer."""

    pairs: Callable[[Cursor], Iterator[Pair]]

    def bind(self, context: Context) -> Node:
        """See `Source.bind`."""
        return Stepping(lambda _, cursor: self.pairs(cursor), context.at(name="source"))


@value
class fetch(Elementwise):
    """Turn indices into a batch."""

    replica: Replica
    exact: ClassVar[bool] = True
    keeps_index: ClassVar[bool] = True

    def apply(self, x: Any, key: tuple[int, ...], context: Context) -> tuple[Any]:
        """See `Elementwise.apply`."""
        _collate_into(context.empty)
        return (self.replica.fetched(x),)

    def apply_all(self, xs: list[Any], origins: Origins, at: Positions, context: Context) -> list[Any]:
        """See `Elementwise.apply_all`."""
        return [self.apply(x, (), context)[0] for x in xs]


# -- iterable-style data sets: each worker runs a replica --------------------------------------------------------------


@value
class Batches(Source):
    """The batches of one replica of an iterable-style data set.

    The cursor is (batches, state of the iterator, state of the data set, whether it is over, which batches failed);
    states are None where there is no such protocol, and the batches then are drawn again. Without workers the first
    element says that the data set is open; the last one, if the data set has a state, is `Ended` with it.
    """

    replica: Replica

    def bind(self, context: Context) -> Node:
        """See `Source.bind`."""
        return Stepping(self._pairs, context.at(name="source"))

    def _pairs(self, context: Context, cursor: Cursor) -> Iterator[Pair]:
        _collate_into(context.empty)
        given, of_items, of_dataset, over, failed = cursor or (0, None, None, False, ())
        dataset, replica = self.replica.dataset, self.replica
        if of_dataset is not None:
            dataset.load_state_dict(copy.deepcopy(of_dataset))
        items: Any = iter(()) if over else iter(dataset)  # asked again it might begin its next epoch
        if of_items is not None and not over:
            items.load_state_dict(copy.deepcopy(of_items))
        elif of_dataset is None and not over:
            replica.passed_over(items, given, failed)
        if context.shard is None:
            yield BEGUN, (given, *_states(dataset, items), over, failed)
        while not over:
            batch, over = replica.drawn(items)
            if batch is ENDED:
                break
            failed = (*failed, given) if isinstance(batch, Failure) else failed
            given += 1
            yield batch, (given, *_states(dataset, items), over, failed)
        if is_stateful(dataset):
            state = copy.deepcopy(dataset.state_dict())
            yield Ended(state), (given, None, state, True, failed)


@dataclass(frozen=True)
class Ended:
    """The state of a data set behind its last batch."""

    state: Any


def _states(dataset: Any, items: Any) -> tuple[Any, Any]:
    of_items = copy.deepcopy(items.state_dict()) if is_stateful(items) else None
    of_dataset = copy.deepcopy(dataset.state_dict()) if items is not dataset and is_stateful(dataset) else None
    return of_items, of_dataset


@value
class replicate(shard_by_worker):
    """Run a replica of everything before it in each shard, and let it divide the data itself, as torch does."""

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """See `Stage.bind`: nothing is left out."""
        return upstream(context)


# -- the worker itself -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Make a worker what torch makes it, before it fetches anything."""

    dataset: Any
    workers: int
    base_seed: int
    init_fn: Callable[[int], Any] | None

    def __call__(self, number: int, state: Any) -> None:
        """Seed, tell the worker who it is, call the user's function, and let the data set go on from its state."""
        seed = self.base_seed + number
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(_numpy_seed(self.base_seed, number))  # noqa: NPY002  # the one that users draw from
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=number, num_workers=self.workers, seed=seed, dataset=self.dataset
        )
        if self.init_fn is not None:
            self.init_fn(number)
        if state is not None:
            self.dataset.load_state_dict(state)


_numpy_seed: Callable[[int, int], list[int]] = torch_worker._generate_state


def _collate_into(empty: Empty) -> None:
    """Let torch's `default_collate` fill arrays of this worker's arena, wherever it is called; users' rules stay.

    In workers of its own torch has it allocate a file in shared memory for each tensor.
    """
    if empty is np.empty:  # not in a worker
        return
    rules: dict[Any, Any] = torch_collate.default_collate_fn_map
    for cls, theirs, ours in (
        (torch.Tensor, torch_collate.collate_tensor_fn, _stacked_tensors),
        (np.ndarray, torch_collate.collate_numpy_array_fn, _stacked_arrays),
    ):
        rule: Any = rules.get(cls)
        if rule is theirs or (_is_ours(rule) and rule.args[0] is not empty):  # ours in the worker that forked this one
            rules[cls] = functools.partial(ours, empty, os.getpid())


def _is_ours(rule: Any) -> bool:
    return isinstance(rule, functools.partial) and rule.func in (_stacked_tensors, _stacked_arrays)


def _stacked_tensors(empty: Empty, owner: int, batch: Any, *, collate_fn_map: Any = None) -> Any:
    first = batch[0]
    empty = empty if os.getpid() == owner else np.empty  # a fork of the worker must not write to its arena
    plain = type(first) is torch.Tensor and first.layout is torch.strided and first.device.type == "cpu"
    plain = plain and not first.is_nested and not first.requires_grad and first.dtype in _NUMPY_DTYPES
    if not plain or not _same(DTYPE, batch):  # torch promotes
        return _without_sharing(torch_collate.collate_tensor_fn, batch, collate_fn_map)
    out = torch.from_numpy(empty((len(batch), *first.shape), _NUMPY_DTYPES[first.dtype]))
    return torch.stack(batch, 0, out=out)


def _stacked_arrays(empty: Empty, owner: int, batch: Any, *, collate_fn_map: Any = None) -> Any:
    first = batch[0]
    empty = empty if os.getpid() == owner else np.empty  # see above
    plain = first.dtype.kind in "biufc" and first.dtype.isnative and first.size and first.ndim
    if plain and _same(type, batch) and _same(SHAPE, batch) and _same(DTYPE, batch):
        out = empty((len(batch), *first.shape), first.dtype)
        np.concatenate(batch, out=out.reshape(-1, *first.shape[1:]))
        return torch.from_numpy(out)
    return _without_sharing(torch_collate.collate_numpy_array_fn, batch, collate_fn_map)


def _same(of: Callable[[Any], Any], batch: Any) -> bool:
    return len(set(map(of, batch))) == 1


def _without_sharing(rule: Callable[..., Any], batch: Iterable[Any], collate_fn_map: Any) -> Any:
    """Call torch's rule as if outside a worker, where it makes plain tensors."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return rule(batch, collate_fn_map=collate_fn_map)
    finally:
        torch_worker._worker_info = info


_NUMPY_DTYPES = {
    torch.from_numpy(np.empty(0, dtype)).dtype: np.dtype(dtype)
    for dtype in (bool, "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")
}
