"""The drop-in `DataLoader` beside torch's own, which is the oracle: equal batches, types, draws and refusals.

Every combination of data set, batching, order, collation, pinning and number of workers is generated; the two loaders
are made and iterated under the same torch seed.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import Gate
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import pipes

DataLoader: Any = pipes.DataLoader  # typed as torch's, which wants a `Dataset` where any sequence will do
FORK = "ignore:.*fork.*:DeprecationWarning"
pytestmark = [pytest.mark.filterwarnings(FORK), pytest.mark.filterwarnings("ignore:This DataLoader will create")]

# -- data sets ---------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    label: int


SAMPLES: dict[str, Callable[[int], Any]] = {
    "floats": lambda i: np.full(3, i, np.float32),
    "pairs": lambda i: (torch.full((2, 2), float(i)), i),
    "dicts": lambda i: {"a": [np.int64(i), i / 2], "b": f"row {i}", "c": (i > 3, b"x")},
    "points": lambda i: Point(np.arange(i, i + 2), i),
    "doubles": lambda i: [np.full((2, 3), i, np.float64), np.float32(i), np.uint8(i)],
    "complex": lambda i: (np.full(1, i + 1j, np.complex64), torch.tensor(i, dtype=torch.bfloat16)),
    "large": lambda i: np.full((4, 4096), i, np.uint8),
}


class Mapped(Dataset[Any]):
    """A map-style data set; with `draws` each sample holds a draw of every global generator."""

    def __init__(self, size: int, kind: str, *, draws: bool = False) -> None:
        self.size, self.kind, self.draws = size, kind, draws

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.size:
            raise IndexError(i)
        x = SAMPLES[self.kind](i)
        return (x, torch.rand(2), np.random.rand(), random.random()) if self.draws else x


class InBulk(Mapped):
    """One that is asked for a whole batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class Streamed(IterableDataset[Any]):
    """An iterable-style data set whose replicas differ in length."""

    def __init__(self, size: int, kind: str, *, draws: bool = False) -> None:
        self.size, self.kind, self.draws = size, kind, draws

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        begin, step = (0, 1) if worker is None else (worker.id, worker.num_workers + worker.id)
        for i in range(begin, self.size, step):
            x = SAMPLES[self.kind](i)
            yield (x, torch.rand(2), np.random.rand(), random.random()) if self.draws else x


def of_tensors(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(3 * size)).reshape(size, 3), torch.arange(size))


# -- generated loaders -------------------------------------------------------------------------------------------------


class Every(collections.abc.Sized):
    """A sampler that is no `Sampler`: any iterable with a length, which draws when it is asked for an iterator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "sequential": SequentialSampler,
    "random": RandomSampler,
    "replacement": lambda d: RandomSampler(d, replacement=True, num_samples=len(d) + 3),
    "generator": lambda d: RandomSampler(d, generator=torch.Generator().manual_seed(5)),
    "weighted": lambda d: WeightedRandomSampler(list(range(1, len(d) + 1)), len(d)),
    "subset": lambda d: SubsetRandomSampler(range(len(d) // 2)),
    "distributed": lambda d: DistributedSampler(d, 2, 1, shuffle=True, seed=3),
    "eager": lambda d: Every(len(d)),
    "list": lambda d: list(range(len(d) - 1, -1, -1)),
}
BATCH_SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "random": lambda d: BatchSampler(RandomSampler(d), 3, drop_last=True),
    "uneven": lambda d: [[0], list(range(len(d))), [len(d) - 1, 0]],
}
COLLATES: dict[str, Callable[[Any], Any] | None] = {"default": None, "list": list, "counted": lambda xs: (len(xs), xs)}


@dataclasses.dataclass
class Case:
    """The arguments of a loader; made afresh for each of the two."""

    dataset: str
    kind: str
    size: int
    draws: bool
    workers: int
    options: dict[str, Any]
    sampler: str | None
    batch_sampler: str | None
    collate: str
    seeded: bool

    def loader(self, cls: Any) -> Any:
        makers: dict[str, Any] = {"map": Mapped, "bulk": InBulk, "iterable": Streamed}
        tensors = self.dataset == "tensors"
        data = of_tensors(self.size) if tensors else makers[self.dataset](self.size, self.kind, draws=self.draws)
        options = dict(self.options, num_workers=self.workers, collate_fn=COLLATES[self.collate])
        if self.sampler is not None:
            options["sampler"] = SAMPLERS[self.sampler](data)
        if self.batch_sampler is not None:
            options["batch_sampler"] = BATCH_SAMPLERS[self.batch_sampler](data)
        if self.seeded:
            options["generator"] = torch.Generator().manual_seed(11)
        return cls(data, **options)


@st.composite
def cases(draw: st.DrawFn, workers: st.SearchStrategy[int], *, sound: bool = True) -> Case:
    """Draw arguments; `sound` ones are such that torch makes a loader of them."""
    count = draw(workers)
    dataset = draw(st.sampled_from(["map", "bulk", "iterable", "tensors"]))
    iterable = dataset == "iterable"
    options: dict[str, Any] = {}
    batching = draw(st.sampled_from(["auto", "none", "sampler"] if not iterable or not sound else ["auto", "none"]))
    batch_sampler = draw(st.sampled_from(sorted(BATCH_SAMPLERS))) if batching == "sampler" else None
    if batching == "none":
        options["batch_size"] = None
    if batching == "auto" or not sound:
        options["batch_size"] = draw(st.integers(1, 5))
        options["drop_last"] = draw(st.booleans())
    sampler = None
    if (not iterable and batching != "sampler") or not sound:
        order = draw(st.sampled_from(["none", "shuffle", "sampler"]))
        sampler = draw(st.sampled_from(sorted(SAMPLERS))) if order == "sampler" else None
        if order == "shuffle" or (not sound and draw(st.booleans())):
            options["shuffle"] = draw(st.booleans()) if not sound else True
    if count:
        options["persistent_workers"] = draw(st.booleans())
        options["prefetch_factor"] = draw(st.sampled_from([None, 1, 2, 3]))
    if not sound:
        options |= draw(st.fixed_dictionaries({}, optional=STRANGE))
    return Case(
        dataset,
        draw(st.sampled_from(sorted(SAMPLES))),
        draw(st.integers(5, 12)),
        draw(st.booleans()),
        count,
        options,
        sampler,
        batch_sampler,
        draw(st.sampled_from(sorted(COLLATES))),
        draw(st.booleans()),
    )


STRANGE: dict[str, st.SearchStrategy[Any]] = {
    "timeout": st.sampled_from([-1, 0]),
    "prefetch_factor": st.sampled_from([-1, 2]),
    "persistent_workers": st.booleans(),
    "multiprocessing_context": st.sampled_from(["fork", "no such", 3]),
    "batch_size": st.sampled_from([0, -1, None, "two", 2]),
    "drop_last": st.booleans(),
}


def same(a: Any, b: Any) -> None:
    """Compare element for element, the types of containers and leaves included."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            same(a[k], b[k])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


def epochs(case: Case, cls: Any) -> list[Any]:
    """Return two epochs, each with what the program itself draws behind it."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    loader = case.loader(cls)
    out: list[Any] = []
    for _ in range(2):
        batches = iter(loader)
        out.append([torch.rand(1), list(batches), torch.rand(1), np.random.rand(), random.random()])
    try:
        out.append(len(loader))
    except TypeError as error:
        out.append(str(error))
    return out


def check_equal(case: Case) -> None:
    same(epochs(case, DataLoader), epochs(case, TorchDataLoader))


@given(case=cases(st.just(0)))
def test_without_workers_it_gives_what_torch_gives(case: Case) -> None:
    check_equal(case)


@settings(max_examples=40)
@given(case=cases(st.integers(1, 3)))
def test_with_workers_it_gives_what_torch_gives(case: Case) -> None:
    check_equal(case)


@given(case=cases(st.integers(-1, 2), sound=False))
def test_what_torch_refuses_is_refused_with_the_same_error(case: Case) -> None:
    def made(cls: Any) -> Any:
        try:
            case.loader(cls)
        except Exception as error:  # whatever it is, it is compared
            return type(error), str(error)
        return None

    assert made(DataLoader) == made(TorchDataLoader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "dataset",
    [
        Subset(Mapped(9, "pairs"), [3, 1, 7]),
        ConcatDataset([Mapped(3, "dicts"), Mapped(4, "dicts")]),
        ChainDataset([Streamed(3, "pairs"), Streamed(2, "pairs")]),
        StackDataset(Mapped(5, "floats"), Mapped(5, "pairs")),
        StackDataset(a=Mapped(5, "floats"), b=InBulk(5, "pairs")),
        of_tensors(7),
        Subset(of_tensors(7), [0, 5]),
        [1.0, 2.0, 3.0],
        range(5),
        np.arange(12).reshape(4, 3),
        torch.arange(12).reshape(4, 3),
        {0: "a", 1: "b", 2: "c"},
        "letters",
    ],
    ids=lambda d: type(d).__name__,
)
def test_any_data_set_gives_what_torch_gives(dataset: Any, workers: int) -> None:
    for options in ({"batch_size": 2}, {"batch_size": None}):
        ours = list(DataLoader(dataset, num_workers=workers, **options))
        same(ours, list(TorchDataLoader(dataset, num_workers=workers, **options)))


class Boom(Dataset[Any]):
    """One whose samples 3 and 4 fail."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> int:
        if i in (3, 4):
            raise KeyError(f"no {i}")
        return i


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 2])
def test_iteration_goes_on_behind_an_exception_where_torchs_does(workers: int, size: int | None) -> None:
    def received(cls: Any) -> list[Any]:
        out: list[Any] = []
        batches = iter(cls(Boom(), batch_size=size, num_workers=workers))
        while True:
            try:
                out.append(next(batches))
            except KeyError:
                out.append("error")
            except StopIteration:
                return out

    same(received(DataLoader), received(TorchDataLoader))


# -- states ------------------------------------------------------------------------------------------------------------


def run(loader: Any, batches: int) -> tuple[list[Any], Iterator[Any]]:
    it = iter(loader)
    return [next(it) for _ in range(batches)], it


@settings(max_examples=40)
@given(
    case=cases(st.just(0)).filter(lambda c: c.dataset != "iterable" and not c.draws),
    workers=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    cut=st.integers(0, 4),
)
def test_a_map_style_loader_goes_on_with_any_number_of_workers(case: Case, workers: tuple[int, int], cut: int) -> None:
    case.workers = workers[0]
    torch.manual_seed(1)
    whole = list(case.loader(DataLoader))
    torch.manual_seed(1)
    first = case.loader(DataLoader)
    head, it = run(first, min(cut, len(whole)))
    state = json.loads(json.dumps(first.state_dict()))
    del it
    torch.manual_seed(2)  # another program
    np.random.seed(2)
    case.workers = workers[1]
    again = case.loader(DataLoader)
    again.load_state_dict(state)
    same([*head, *again], whole)
    assert again.state_dict()["running"] is False


@settings(max_examples=30)
@given(
    case=cases(st.integers(0, 3)).filter(lambda c: c.dataset == "iterable" and not c.options.get("persistent_workers")),
    cuts=st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
def test_an_iterable_style_loader_goes_on_with_its_workers_and_their_draws(case: Case, cuts: list[int]) -> None:
    case.draws = case.draws and case.workers > 0  # without workers the program's own generators are drawn from
    torch.manual_seed(1)
    whole = list(case.loader(DataLoader))
    torch.manual_seed(1)
    loader, received = case.loader(DataLoader), list[Any]()
    for cut in cuts:
        head, it = run(loader, min(cut, len(whole) - len(received)))
        received += head
        state = json.loads(json.dumps(loader.state_dict()))
        del it
        loader = case.loader(DataLoader)
        loader.load_state_dict(state)
    same([*received, *loader], whole)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("given_generator", [False, True])
@pytest.mark.parametrize("cut", [0, 3, 5, None])
def test_the_epochs_behind_a_state_are_those_of_the_uninterrupted_run(
    workers: int, persistent: bool, given_generator: bool, cut: int | None
) -> None:
    def made() -> Any:
        generator = torch.Generator().manual_seed(7) if given_generator else None
        keeps = persistent and workers > 0
        return DataLoader(
            range(10), 2, shuffle=True, num_workers=workers, persistent_workers=keeps, generator=generator
        )

    torch.manual_seed(0)
    loader = made()
    whole = [[b.tolist() for b in loader] for _ in range(3)]
    torch.manual_seed(0)
    loader = made()
    first = [b.tolist() for b in loader]
    if cut is None:
        head, state = [], loader.state_dict()  # between two epochs
    else:
        batches, it = run(loader, cut)
        head, state = [b.tolist() for b in batches], loader.state_dict()
        del it
    now = torch.get_rng_state()
    again = made()
    again.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), now)
    second = head + [b.tolist() for b in again]
    assert [first, second] == whole[:2]
    if given_generator or cut is None:  # else the third epoch's order is the program's generator's
        assert [b.tolist() for b in again] == whole[2]


class Stateful(IterableDataset[int]):
    """Counts its epochs, which is its state; its iterators have one too, and never go back."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return Counting(self.size, self.epoch)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"] - 1 if state["epoch"] else 0


class Counting(Iterator[int]):
    def __init__(self, size: int, epoch: int) -> None:
        self.i, self.size, self.epoch, self.drawn = 0, size, epoch, 0

    def __next__(self) -> int:
        if self.i >= self.size:
            raise StopIteration
        self.i += 1
        self.drawn += 1
        assert self.drawn == self.i or self.drawn < self.i, "replayed"
        return 100 * self.epoch + self.i

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.i = state["i"]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_states_of_data_sets_and_their_iterators_are_honoured(workers: int) -> None:
    whole = [b.tolist() for b in DataLoader(Stateful(7), 2, num_workers=workers)]
    for cut in range(len(whole) + 1):
        loader = DataLoader(Stateful(7), 2, num_workers=workers)
        head, it = run(loader, cut)
        state = json.loads(json.dumps(loader.state_dict()))
        del it
        again = DataLoader(Stateful(7), 2, num_workers=workers)
        again.load_state_dict(state)
        assert [b.tolist() for b in [*head, *again]] == whole


class Resumable:
    """A sampler that goes on where its state says; `drawn` counts what it was asked for."""

    def __init__(self, size: int) -> None:
        self.size, self.at, self.drawn = size, 0, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            self.at += 1
            self.drawn += 1
            yield self.size - self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("workers", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_a_samplers_state_is_the_one_behind_the_batch_received(workers: tuple[int, int]) -> None:
    loader = DataLoader(range(12), 2, sampler=Resumable(12), num_workers=workers[0])
    head, it = run(loader, 2)
    state = loader.state_dict()
    del it
    sampler = Resumable(12)
    again = DataLoader(range(12), 2, sampler=sampler, num_workers=workers[1])
    again.load_state_dict(state)
    assert torch.cat([*head, *again]).tolist() == list(range(11, -1, -1))
    assert sampler.drawn == 8


def test_a_state_of_another_loader_is_refused_by_name() -> None:
    state = DataLoader(range(6), 2).state_dict()
    for other, name in (
        (DataLoader(range(7), 2), "length"),
        (DataLoader(range(6), 3), "batch_size"),
        (DataLoader(range(6), 2, shuffle=True), "sampler"),
        (DataLoader(list(range(6)), 2), "dataset"),
        (DataLoader(range(6), 2, drop_last=True), "drop_last"),
    ):
        with pytest.raises(ValueError, match=name):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="what state_dict"):
        DataLoader(range(6), 2).load_state_dict({"version": 1})
    with pytest.raises(ValueError, match="version 1"):
        DataLoader(range(6), 2).load_state_dict({**state, "version": 2})


def test_an_iterable_style_state_needs_its_number_of_workers() -> None:
    loader = DataLoader(Streamed(9, "pairs"), 2, num_workers=2)
    _, it = run(loader, 1)
    state = loader.state_dict()
    del it
    with pytest.raises(ValueError, match="`num_workers` must be 2"):
        DataLoader(Streamed(9, "pairs"), 2, num_workers=1).load_state_dict(state)


class Gated(IterableDataset[int]):
    """The first replica waits at a named pipe."""

    def __init__(self, path: str) -> None:
        self.gate = Gate(path, held=0)

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        return map(self.gate, range(worker.id, 8, worker.num_workers))


def test_without_order_no_replica_waits_for_another(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    loader = DataLoader(Gated(str(tmp_path / "gate")), batch_size=None, num_workers=2, in_order=False)
    batches = iter(loader)
    assert [next(batches) for _ in range(4)] == [1, 3, 5, 7]
    (tmp_path / "gate").open("w").close()
    assert list(batches) == [0, 2, 4, 6]


def test_without_order_there_is_no_state() -> None:
    loader = DataLoader(range(6), 2, num_workers=1, in_order=False)
    with pytest.raises(RuntimeError, match="in_order=False has no state"):
        loader.state_dict()
    with pytest.raises(RuntimeError, match="in_order=False has no state"):
        loader.load_state_dict({})


def test_a_data_pipe_has_no_state_since_torch_iterates_it() -> None:
    loader = DataLoader(IterableWrapper(range(3)))
    assert torch.cat(list(loader)).tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="DataPipe has no state"):
        loader.state_dict()


def test_a_state_is_not_lost_when_an_iterator_cannot_be_made() -> None:
    class Opens(Streamed):
        fails = False

        def __iter__(self) -> Iterator[Any]:
            if self.fails:
                raise OSError("not mounted")
            return super().__iter__()

    loader = DataLoader(Opens(6, "pairs"), None)
    head, it = run(loader, 2)
    state = loader.state_dict()
    del it
    again = DataLoader(Opens(6, "pairs"), None)
    again.load_state_dict(state)
    again.dataset.fails = True
    with pytest.raises(OSError, match="not mounted"):
        next(iter(again))
    again.dataset.fails = False
    same([*head, *again], list(DataLoader(Opens(6, "pairs"), None)))


def test_persistent_workers_go_on_twice() -> None:
    def made() -> Any:
        return DataLoader(range(12), 2, shuffle=True, num_workers=1, persistent_workers=True)

    torch.manual_seed(0)
    loader = made()
    whole = [[b.tolist() for b in loader] for _ in range(2)]
    torch.manual_seed(0)
    loader = made()
    list(loader)
    second = made()
    second.load_state_dict(loader.state_dict())  # between two epochs
    head, it = run(second, 2)
    third = made()
    third.load_state_dict(second.state_dict())  # in the middle of the next
    del it
    assert [b.tolist() for b in [*head, *third]] == whole[1]


class Hiccup(Iterator[int]):
    """Fails once, at the third item, and goes on."""

    def __init__(self) -> None:
        self.i = 0

    def __next__(self) -> int:
        self.i += 1
        if self.i == 3:
            raise OSError("once")
        if self.i > 6:
            raise StopIteration
        return self.i


class Hiccups(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return Hiccup()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_that_was_received_does_not_come_again(workers: int) -> None:
    loader = DataLoader(Hiccups(), None, num_workers=workers)
    it = iter(loader)
    assert [next(it), next(it)] == [1, 2]
    with pytest.raises(OSError, match="once"):
        next(it)
    state = loader.state_dict()
    assert list(it) == [4, 5, 6]
    again = DataLoader(Hiccups(), None, num_workers=workers)
    again.load_state_dict(state)
    assert list(again) == [4, 5, 6]


class Keeps(Resumable):
    """Goes on counting in the very dict that it was given."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.kept = state
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        for i in super().__iter__():
            if hasattr(self, "kept"):
                self.kept["at"] = self.at
            yield i


def test_a_sampler_may_keep_the_state_it_is_given() -> None:
    loader = DataLoader(range(12), 2, sampler=Keeps(12))
    head, it = run(loader, 2)
    state = loader.state_dict()
    del it
    second = DataLoader(range(12), 2, sampler=Keeps(12), num_workers=1)
    second.load_state_dict(state)
    iter(second)  # draws ahead
    again = DataLoader(range(12), 2, sampler=Keeps(12))
    again.load_state_dict(second.state_dict())
    assert torch.cat([*head, *again]).tolist() == list(range(11, -1, -1))


def test_a_state_that_was_loaded_is_the_state_until_the_next_iteration() -> None:
    loader = DataLoader(range(6), 2, shuffle=True)
    _, it = run(loader, 1)
    state = loader.state_dict()
    del it
    again = DataLoader(range(6), 2, shuffle=True)
    again.load_state_dict(state)
    assert again.state_dict() == state


# -- what begins anew by itself ----------------------------------------------------------------------------------------


class Wrapping(IterableDataset[int]):
    """Begins its next epoch as soon as it is asked behind its end; replicas differ in length."""

    def __init__(self, sizes: list[int], deadly: str = "") -> None:
        self.sizes, self.deadly, self.i, self.epoch = sizes, deadly, 0, 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        while self.i < self.sizes[number]:
            self.i += 1
            if self.deadly and self.i == 4 and not os.path.exists(self.deadly):
                Path(self.deadly).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield 1000 * self.epoch + 100 * number + self.i
        self.i, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.i, self.epoch = state["i"], state["epoch"]


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_cut_behind_the_end_of_a_replica_begins_no_epoch(workers: int) -> None:
    def made() -> Any:
        return DataLoader(Wrapping([9, 3, 0]), 2, num_workers=workers)

    whole = [b.tolist() for b in made()]
    for cut in range(len(whole) + 1):
        loader = made()
        head, it = run(loader, cut)
        state = json.loads(json.dumps(loader.state_dict()))
        del it
        again = made()
        again.load_state_dict(state)
        assert [b.tolist() for b in [*head, *again]] == whole


@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_replica_goes_on_where_it_was(persistent: bool, tmp_path: Path) -> None:
    def epochs(deadly: str) -> list[Any]:
        loader = DataLoader(Wrapping([7, 5], deadly), 2, num_workers=2, persistent_workers=persistent)
        return [[b.tolist() for b in loader] for _ in range(2)]

    assert epochs(str(tmp_path / "killed")) == epochs("")
    assert (tmp_path / "killed").exists()


def test_persistent_workers_killed_between_two_epochs_have_successors_that_know_their_state() -> None:
    def epochs(kill: bool) -> list[Any]:
        loader = DataLoader(Wrapping([5, 4]), 2, num_workers=2, persistent_workers=True)
        first = iter(loader)
        out = [[b.tolist() for b in first]]
        for worker in first._workers if kill else ():
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        return [*out, [b.tolist() for b in loader]]

    assert epochs(kill=True) == epochs(kill=False)


class Shuffles(Resumable):
    """Counts its epochs, each in an order of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(self.size).tolist()
        while self.at < self.size:
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, None])
def test_a_samplers_epochs_go_on(workers: int, batched: bool, cut: int | None) -> None:
    def made() -> Any:
        sampler: Any = Shuffles(10)
        if batched:
            return DataLoader(range(10), batch_sampler=BatchSampler(sampler, 4, drop_last=False), num_workers=workers)
        return DataLoader(range(10), 4, sampler=sampler, num_workers=workers)

    loader = made()
    whole = [[b.tolist() for b in loader] for _ in range(3)]
    loader = made()
    assert [b.tolist() for b in loader] == whole[0]
    batches, it = run(loader, cut) if cut is not None else ([], None)
    state = json.loads(json.dumps(loader.state_dict()))
    del it
    again = made()
    again.load_state_dict(state)
    assert [b.tolist() for b in [*batches, *again]] == whole[1]
    assert [b.tolist() for b in again] == whole[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_in_a_batch_sampler_is_part_of_the_state(workers: int) -> None:
    def made(seed: int) -> Any:
        order = RandomSampler(range(10), generator=torch.Generator().manual_seed(seed))
        return DataLoader(range(10), batch_sampler=BatchSampler(order, 2, drop_last=False), num_workers=workers)

    loader = made(1)
    whole = [[b.tolist() for b in loader] for _ in range(2)]
    loader = made(1)
    list(loader)
    head, it = run(loader, 3)
    state = loader.state_dict()
    del it
    again = made(2)
    again.load_state_dict(state)
    assert [b.tolist() for b in [*head, *again]] == whole[1]


def test_an_epoch_that_was_broken_off_does_not_look_ended(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    loader = DataLoader(Gated(str(tmp_path / "gate")), batch_size=None, num_workers=1, timeout=0.5)
    batches = iter(loader)
    with pytest.raises(pipes.WorkerTimeoutError, match=r"DataLoader timed out after 0\.5 seconds"):
        next(batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken off by WorkerTimeoutError"):
            next(batches)


IN_A_SPAWNED_CHILD = """
import torch
from pipes import DataLoader

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return Square(i * i)

class Square:
    def __init__(self, x): self.x = x

def child(rank, method):
    loader = DataLoader(Squares(), None, num_workers=1, multiprocessing_context=method)
    squares = list(loader)
    assert all(type(s) is Square for s in squares)
    print(method, [s.x for s in squares], flush=True)

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        torch.multiprocessing.spawn(child, (method,), nprocs=1)
"""


def test_a_child_of_multiprocessing_may_load_what_its_script_defines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_A_SPAWNED_CHILD, encoding="utf-8")
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=80)
    assert done.stdout.splitlines() == [f"{method} [0, 1, 4, 9]" for method in ("fork", "spawn", "forkserver")]


class Held(Dataset[int]):
    """Tells which worker fetched a sample; the first sample waits until another worker has fetched all of its own."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> int:
        if i == 0:
            Path(self.path).read_text()
        if i == 5:
            Path(self.path).write_text("go on")
        worker = get_worker_info()
        return -1 if worker is None else worker.id


def test_batches_are_dealt_in_rotation_however_busy_a_worker_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    loader = DataLoader(Held(str(tmp_path / "gate")), None, num_workers=2, prefetch_factor=3)
    assert list(loader) == [0, 1] * 6


class Shrunk(IterableDataset[int]):
    """Gives eight numbers, or fewer, or fails on the way."""

    def __init__(self, size: int = 8, fails_at: int = -1) -> None:
        self.size, self.fails_at = size, fails_at

    def __iter__(self) -> Iterator[int]:
        for i in range(self.size):
            if i == self.fails_at:
                raise OSError("the disk is gone")
            yield i


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("later", "error", "message"),
    [(Shrunk(fails_at=1), OSError, "the disk is gone"), (Shrunk(size=3), pipes.StageError, "must give again")],
)
def test_what_cannot_be_drawn_again_is_an_error_and_no_shorter_epoch(
    workers: int, later: Any, error: type[Exception], message: str
) -> None:
    loader = DataLoader(Shrunk(), 2, num_workers=workers)
    _, it = run(loader, 3)
    state = loader.state_dict()
    del it
    again = DataLoader(later, 2, num_workers=workers)
    again.load_state_dict(state)
    with pytest.raises(error, match=message):
        list(again)


class Forks(Dataset[Any]):
    """Forks a process with the first sample, which collates nonsense when the third is asked for."""

    def __init__(self) -> None:
        self.child = self.tell = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        if i == 0:
            told, self.tell = os.pipe()
            self.child = os.fork()
            if self.child == 0:
                os.read(told, 1)
                default_collate([np.full(1 << 14, -1, np.int32)] * 2)
                os._exit(0)
        if i == 2:  # the first batch is collated now
            os.write(self.tell, b".")
            os.waitpid(self.child, 0)
        return np.full(1 << 14, i, np.int32)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_a_worker_writes_to_no_memory_of_the_workers() -> None:
    loader = DataLoader(Forks(), 2, num_workers=1, multiprocessing_context="fork")
    for k, batch in enumerate(list(loader)):  # all held, and then looked at
        assert [row.unique().tolist() for row in batch] == [[2 * k], [2 * k + 1]]
