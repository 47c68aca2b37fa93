"""`DataLoader`: what torch documents and tests of its own loader, behaviour by behaviour; torch's is the oracle."""

from __future__ import annotations

import collections
import copy
import multiprocessing
import os
import pickle
import random
import select
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tasks import (
    KINDS,
    Blocks,
    CustomError,
    DiesAtStart,
    FailsAt,
    Kills,
    TwoArgumentsError,
    lock_at_three,
    pid_of,
    raise_a,
    untouched,
    with_pid,
)
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.datapipes.iter import IterableWrapper

from pipes import DataLoader, StageError, WorkerError

METHODS = ("fork", "forkserver", "spawn")
FORK: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
KEPT: dict[str, Any] = {**FORK, "persistent_workers": True}
both = pytest.mark.parametrize("workers", [{}, FORK], ids=["here", "workers"])
all_three = pytest.mark.parametrize("workers", [{}, FORK, KEPT], ids=["here", "workers", "persistent"])
LIMIT = 60
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a single processor


# -- data sets and functions -------------------------------------------------------------------------------------------


class Mapped(Dataset[Any]):
    """A function of the index."""

    def __init__(self, fn: Any = untouched, n: int = 8) -> None:
        self.fn, self.n = fn, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        return self.fn(i)


class Stream(IterableDataset[Any]):
    """A function of the numbers from 0 on, all of them in every worker."""

    def __init__(self, fn: Any = untouched, n: int = 8) -> None:
        self.fn, self.n = fn, n

    def __iter__(self) -> Iterator[Any]:
        return (self.fn(i) for i in range(self.n))


class Sharded(IterableDataset[Any]):
    """A function of the numbers from 0 on, of which each worker has its part: the first one the smallest."""

    def __init__(self, fn: Any = untouched, n: int = 11) -> None:
        self.fn, self.n = fn, n

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, last = (0, self.n) if info is None else ((0, 3), (3, self.n))[info.id]
        return map(self.fn, range(first, last))


class Told(NamedTuple):
    number: int
    info: tuple[int, int, int] | None
    own: bool
    threads: int
    draws: Any
    pid: int


def tells() -> Any:
    """Whatever a worker can know; of a class that it cannot import."""

    class Tells(Dataset[Any]):
        offset = 0

        def __len__(self) -> int:
            return 9

        def __getitem__(self, i: int) -> tuple[Any, ...]:
            info = get_worker_info()
            who = None if info is None else (info.id, info.num_workers, info.seed)
            own = info is not None and info.dataset is self
            draws = random.random(), float(np.random.random()), float(torch.rand(()))
            return i + self.offset, who, own, torch.get_num_threads(), draws, os.getpid()

    return Tells()


class Counts(Dataset[Any]):
    """Remember how often it was asked."""

    def __init__(self) -> None:
        self.asked, self.scale = 0, 1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[int, int, int]:
        self.asked += 1
        return i * self.scale, self.asked, os.getpid()


class Notes:
    """Write down each call, whatever process it comes from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __call__(self, x: Any) -> Any:
        with self.path.open("a") as file:
            file.write(f"{x}\n")
        return x

    @property
    def calls(self) -> list[str]:
        return sorted(self.path.read_text().split())


class Asked(Sampler[int]):
    """Count the indices that were drawn."""

    def __init__(self, n: int) -> None:
        self.n, self.count = n, 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for i in range(self.n):
            self.count += 1
            yield i


class Ends(Sampler[Any]):
    """Raise behind some indices."""

    def __init__(self, *indices: Any) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        yield from self.indices
        raise CustomError("sampler", code=3)


class Resumes(IterableDataset[Any]):
    """An iterator that goes on behind its failure, which no generator does."""

    def __iter__(self) -> Iterator[Any]:
        self.i = -1
        return self

    def __next__(self) -> int:
        self.i += 1
        if self.i == 8:
            raise StopIteration
        return int(FailsAt(3, "key")(self.i))


class NeverBegins(IterableDataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        raise_a(self.kind, "begin")
        return iter(())


def drawn(x: Any) -> tuple[Any, float, float, float]:
    return x, random.random(), float(np.random.random()), float(torch.rand(()))


def failing_batch(samples: list[Any]) -> list[Any]:
    return [FailsAt(3, "custom")(x) for x in samples]


def stopping_batch(samples: list[Any]) -> list[Any]:
    if 3 in samples:
        raise StopIteration
    return samples


# -- the two loaders ---------------------------------------------------------------------------------------------------


def ours(dataset: Any, *args: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, *args, **options)


def outcomes(loader: Any) -> list[Any]:
    """What an epoch gives: an exception as its type, behind which `next` is asked again."""
    got: list[Any] = []
    running = iter(loader)
    for _ in range(LIMIT):
        try:
            got.append(next(running))
        except StopIteration:
            return got
        except Exception as error:
            got.append(type(error))
    raise AssertionError(f"no end: {got}")


def samples_of(loader: Any) -> list[Any]:
    return [x for batch in loader for x in batch]


def two_epochs(cls: type[TorchDataLoader[Any]], dataset: Any, **options: Any) -> list[Any]:
    """What two epochs give under a seed, and the next draw behind each."""
    torch.manual_seed(7)
    with warnings.catch_warnings():
        if cls is TorchDataLoader:
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        loader = cls(dataset, **options)
        return [(plain(outcomes(loader)), torch.rand(()).item()) for _ in range(2)]


def assert_same_batches(dataset: Any, workers: dict[str, Any], **options: Any) -> None:
    """The batches are those that torch makes without workers."""
    torch.manual_seed(7)
    expected = plain(outcomes(TorchDataLoader(dataset, **options)))
    torch.manual_seed(7)
    assert plain(outcomes(DataLoader(dataset, **options, **workers))) == expected


def assert_like_torch(dataset: Any, **options: Any) -> None:
    random.seed(7)
    np.random.seed(7)
    expected = two_epochs(TorchDataLoader, copy.deepcopy(dataset), **copy.deepcopy(options))
    random.seed(7)
    np.random.seed(7)
    assert two_epochs(DataLoader, dataset, **options) == expected


def plain(x: Any) -> Any:
    """Types and values, to be compared with `==`."""
    name = type(x).__name__
    if isinstance(x, torch.Tensor):
        dense = x.detach().to_dense() if x.layout != torch.strided else x.detach()
        return name, x.dtype, x.layout, x.shape, x.requires_grad, repr(dense.tolist())
    if isinstance(x, np.ndarray):
        return name, x.dtype, x.shape, repr(x.tolist())
    if isinstance(x, Mapping):
        return name, [(k, plain(v)) for k, v in x.items()]
    if isinstance(x, Sequence) and not isinstance(x, (str, bytes)):
        return name, [plain(v) for v in x]
    return name, x


# -- what a worker is --------------------------------------------------------------------------------------------------


def setup(cls: type[TorchDataLoader[Any]], dataset: Any, method: str) -> Any:
    return cls(
        dataset,
        shuffle=True,
        batch_size=2,
        collate_fn=list,
        num_workers=2,
        multiprocessing_context=method,
        generator=torch.Generator().manual_seed(3),
        worker_init_fn=lambda worker: setattr(get_worker_info().dataset, "offset", 100 * worker),  # type: ignore[union-attr]
    )


@pytest.fixture(scope="module", params=METHODS)
def told(request: pytest.FixtureRequest) -> list[Told]:
    """An epoch that the tests below share."""
    dataset = tells()
    batches = list(setup(DataLoader, dataset, request.param))
    assert dataset.offset == 0
    return [Told(*t) for batch in batches for t in batch]


def test_a_worker_knows_who_it_is(told: list[Told]) -> None:
    base = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)))
    assert [t.info for t in told] == [(w, 2, base + w) for w in (0, 0, 1, 1, 0, 0, 1, 1, 0)]
    assert get_worker_info() is None


def test_a_worker_has_its_own_copy_of_the_data_set_and_one_thread(told: list[Told]) -> None:
    assert {t.own for t in told} == {True}
    assert {t.threads for t in told} == {1}
    assert len({t.pid for t in told}) == 2
    assert os.getpid() not in {t.pid for t in told}


def test_a_lambda_changes_the_copy_under_any_start_method(told: list[Told]) -> None:
    assert [t.number // 100 for t in told] == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert sorted(t.number % 100 for t in told) == list(range(9))


def test_every_start_method_gives_what_torch_gives(told: list[Told]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        expected = [Told(*t) for batch in setup(TorchDataLoader, tells(), "fork") for t in batch]
    assert [t._replace(pid=0) for t in told] == [t._replace(pid=0) for t in expected]


def test_without_workers_there_is_no_worker_info() -> None:
    assert {Told(*t).info for t in ours(tells(), None, collate_fn=untouched)} == {None}


@all_three
@pytest.mark.parametrize("shuffle", [False, True])
def test_draws_orders_and_the_programs_generators_are_torchs(workers: dict[str, Any], shuffle: bool) -> None:
    assert_like_torch(Mapped(drawn), batch_size=3, shuffle=shuffle, **workers)


@all_three
@pytest.mark.parametrize(
    "options", [{"batch_size": None}, {"batch_size": 2}, {"batch_size": 2, "drop_last": True}], ids=["1", "2", "drop"]
)
def test_draws_of_iterable_style_data_are_torchs(workers: dict[str, Any], options: dict[str, Any]) -> None:
    assert_like_torch(Sharded(drawn), **options, **workers)


@all_three
def test_a_generator_of_the_loader_is_used_as_torch_does(workers: dict[str, Any]) -> None:
    assert_like_torch(Mapped(drawn), shuffle=True, generator=torch.Generator().manual_seed(9), **workers)


def convolved(i: int) -> float:
    return float(torch.nn.functional.conv2d(torch.full((1, 1, 64, 64), float(i)), torch.ones(1, 1, 3, 3)).sum())


def test_a_forked_worker_computes_after_the_program_has_used_its_threads() -> None:
    expected = [convolved(i) for i in range(8)]
    assert list(ours(Mapped(convolved), batch_size=None, **FORK)) == expected


# -- worker_init_fn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "calls"), [({}, []), (FORK, ["0", "0", "1", "1"]), (KEPT, ["0", "1"])], ids=["0", "2", "persistent"]
)
@pytest.mark.parametrize("dataset", [Mapped(), Stream()], ids=["map", "iterable"])
def test_worker_init_fn_is_called_by_each_new_worker(
    workers: dict[str, Any], calls: list[str], dataset: Any, tmp_path: Path
) -> None:
    notes = Notes(tmp_path / "notes")
    loader = ours(dataset, worker_init_fn=notes, **workers)
    assert len(list(loader)) == len(list(loader))
    assert notes.calls == calls


def reseeding(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert torch.initial_seed() == info.seed
    torch.manual_seed(worker)
    dataset: Any = info.dataset
    dataset.fn = drawn_once


def drawn_once(_: Any) -> float:
    return float(torch.rand(()))


def test_worker_init_fn_comes_after_seeding_and_before_loading() -> None:
    loader = ours(Mapped(n=4), batch_size=None, worker_init_fn=reseeding, **FORK)
    first, second = ([float(torch.rand((), generator=g)) for _ in range(2)] for g in map(seeded, range(2)))
    assert list(loader) == [first[0], second[0], first[1], second[1]]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def divided(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.fn = [10 * worker + i for i in range(8)].__getitem__


def test_worker_init_fn_may_divide_iterable_style_data() -> None:
    loader = ours(Stream(n=3), batch_size=None, worker_init_fn=divided, **FORK)
    assert list(loader) == [0, 10, 1, 11, 2, 12]


# -- persistent workers ------------------------------------------------------------------------------------------------


def columns(loader: Any) -> list[list[int]]:
    return [list(column) for column in zip(*loader)]


def test_persistent_workers_and_their_data_sets_live_on() -> None:
    loader = ours(Counts(), batch_size=None, **KEPT)
    (x, asked, pids), (again, asked_again, same_pids) = columns(loader), columns(loader)
    assert x == again == list(range(8))
    assert asked == [1, 1, 2, 2, 3, 3, 4, 4]
    assert asked_again == [5, 5, 6, 6, 7, 7, 8, 8]
    assert pids == same_pids
    assert len(set(pids)) == 2


def test_other_workers_begin_anew() -> None:
    loader = ours(Counts(), batch_size=None, **FORK)
    (_, asked, pids), (_, asked_again, other_pids) = columns(loader), columns(loader)
    assert asked == asked_again == [1, 1, 2, 2, 3, 3, 4, 4]
    assert not set(pids) & set(other_pids)


@pytest.mark.parametrize(("workers", "seen"), [({}, 10), (FORK, 10), (KEPT, 1)], ids=["0", "2", "persistent"])
def test_whether_workers_see_a_change_between_epochs(workers: dict[str, Any], seen: int) -> None:
    dataset = Counts()
    loader = ours(dataset, batch_size=None, **workers)
    assert columns(loader)[0] == list(range(8))
    dataset.scale = 10
    assert columns(loader)[0] == [i * seen for i in range(8)]


def test_a_persistent_loader_has_one_iterator() -> None:
    loader = ours(Mapped(), batch_size=None, **KEPT)
    running = iter(loader)
    assert [next(running) for _ in range(3)] == [0, 1, 2]
    assert iter(loader) is running
    assert list(running) == list(range(8))
    assert list(loader) == list(range(8))


def test_persistent_iterable_style_data_is_iterated_again_by_the_same_workers() -> None:
    loader = ours(Sharded(with_pid), batch_size=None, **KEPT)
    assert next(iter(loader))[0] == 0
    first, second = list(loader), list(loader)
    assert first == second
    assert [x for x, _ in first] == [0, 3, 1, 4, 2, 5, 6, 7, 8, 9, 10]


# -- early exits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [FORK, KEPT], ids=["new", "persistent"])
@pytest.mark.parametrize("dataset", [Mapped(n=1000), Stream(n=1000)], ids=["map", "iterable"])
def test_workers_end_with_what_holds_them(workers: dict[str, Any], dataset: Any) -> None:
    loader = ours(dataset, **workers)
    running: Any = iter(loader)
    next(running)
    processes = running._workers
    assert len(processes) == 2
    assert all(w.is_alive() and w.exitcode is None and w.pid != os.getpid() for w in processes)
    del running, loader
    for w in processes:
        w.join(timeout=10)
    assert not any(w.is_alive() for w in processes)


def test_workers_end_when_a_loop_is_left() -> None:
    loader = ours(Mapped(pid_of, n=1000), batch_size=None, **FORK)
    for pid in loader:
        fd = os.pidfd_open(pid)
        break
    assert select.select([fd], [], [], 10)[0]
    os.close(fd)


def test_workers_end_with_the_epoch_unless_they_are_persistent() -> None:
    for options in (FORK, KEPT):
        loader = ours(Mapped(), batch_size=None, **options)
        running: Any = iter(loader)
        processes = [next(running), running._workers][1]
        assert list(running) == list(range(1, 8))
        if options is FORK:
            for w in processes:
                w.join(timeout=10)
        assert [w.is_alive() for w in processes] == [options is KEPT] * 2


@pytest.mark.parametrize("workers", [{}, FORK, KEPT], ids=["0", "2", "persistent"])
def test_an_iterator_is_left_and_another_begun(workers: dict[str, Any]) -> None:
    loader = ours(Mapped(n=30), batch_size=4, collate_fn=list, **workers)
    for stop in range(4):
        for i, batch in enumerate(loader):
            assert batch == list(range(4 * i, 4 * i + 4))
            if i == stop:
                break
    assert samples_of(loader) == list(range(30))


def test_an_ended_iterator_stays_at_its_end() -> None:
    for workers in ({}, FORK):
        running = iter(ours(Mapped(), **workers))
        assert len(list(running)) == 8
        assert list(running) == []


def test_large_indices_do_not_block_an_early_exit() -> None:
    batches = [torch.full((1 << 19,), i) for i in range(30)]
    loader = ours(Mapped(torch.Tensor.numel), None, sampler=batches, prefetch_factor=4, **FORK)
    running: Any = iter(loader)
    assert next(running) == 1 << 19
    processes = running._workers
    del running
    for w in processes:
        w.join(timeout=10)
    assert not any(w.is_alive() for w in processes)


# -- exceptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stop"])
@both
def test_an_exception_is_the_users_own(workers: dict[str, Any], kind: str) -> None:
    def raised(fn: Any) -> Exception:
        try:
            fn()
        except Exception as error:
            return error
        raise AssertionError

    here = raised(lambda: raise_a(kind, 3))
    error = raised(lambda: list(ours(Mapped(FailsAt(3, kind)), **workers)))
    assert type(error) is type(here)
    assert error.args == here.args
    assert {k: v for k, v in vars(error).items() if k != "__notes__"} == {
        k: v for k, v in vars(here).items() if k != "__notes__"
    }
    assert type(error.__cause__) is type(here.__cause__)
    notes = "".join(getattr(error, "__notes__", ()))
    assert ("DataLoader worker process 1" in notes) == bool(workers)
    assert ("raise_a(self.kind, x)" in notes) == bool(workers)  # the traceback in the worker


class Bulk(Dataset[int]):
    """Batches at once, but for one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        raise AssertionError("a batch is asked for at once")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [FailsAt(3, self.kind)(i) for i in indices]


@all_three
@pytest.mark.parametrize(
    ("dataset", "collate", "error"),
    [
        (Mapped(FailsAt(3, "two")), list, TwoArgumentsError),
        (Bulk("key"), list, KeyError),
        (Mapped(), failing_batch, CustomError),
        (Resumes(), list, KeyError),
        (Stream(), failing_batch, CustomError),
    ],
    ids=["getitem", "getitems", "collate", "iterator", "collate stream"],
)
def test_next_goes_on_behind_a_failing_batch(
    workers: dict[str, Any], dataset: Any, collate: Any, error: type[Exception]
) -> None:
    times = 2 if workers and isinstance(dataset, IterableDataset) else 1  # in each worker
    expected = [x for x in ([0, 1], error, [4, 5], [6, 7]) for _ in range(times)]
    loader = ours(dataset, 2, collate_fn=collate, **workers)
    assert outcomes(loader) == expected
    assert outcomes(loader) == expected


@both
def test_a_failing_sample_without_batches(workers: dict[str, Any]) -> None:
    loader = ours(Mapped(FailsAt(3, "key")), None, **workers)
    assert outcomes(loader) == [0, 1, 2, KeyError, 4, 5, 6, 7]


@all_three
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sampler": Ends(3, 1, 2), "batch_size": 2}, [[3, 1], CustomError]),
        ({"sampler": Ends(3, 1, 2), "batch_size": 1}, [[3], [1], [2], CustomError]),
        ({"sampler": Ends(*range(7)), "batch_size": 1}, [*([i] for i in range(7)), CustomError]),
        ({"sampler": Ends(), "batch_size": 1}, [CustomError]),
        ({"batch_sampler": Ends([3, 1], [2])}, [[3, 1], [2], CustomError]),
        ({"batch_sampler": BatchSampler(Ends(3, 1, 2), 2, drop_last=True)}, [[3, 1], CustomError]),
    ],
    ids=["incomplete", "few", "many", "none", "batches", "torch's batches"],
)
def test_an_exception_of_a_sampler_comes_behind_what_it_gave(
    workers: dict[str, Any], options: dict[str, Any], expected: list[Any]
) -> None:
    loader = ours(Mapped(), collate_fn=list, **options, **workers)
    assert outcomes(loader) == expected
    assert outcomes(loader) == expected


@both
def test_an_exception_of_a_sampler_before_it_begins_is_raised(workers: dict[str, Any]) -> None:
    class Broken(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            raise CustomError("sampler", code=3)

    with pytest.raises(CustomError):
        list(ours(Mapped(), 2, sampler=Broken(), **workers))


@both
def test_an_exception_ends_a_stream_and_comes_behind_what_it_gave(workers: dict[str, Any]) -> None:
    loader = ours(Stream(FailsAt(5, "custom")), 2, collate_fn=list, **workers)
    times = 2 if workers else 1
    assert outcomes(loader) == [x for x in ([0, 1], [2, 3], CustomError) for _ in range(times)]


@both
@pytest.mark.parametrize(("kind", "expected"), [("custom", CustomError), ("stop", RuntimeError)])
def test_a_stream_that_does_not_begin_is_an_error(workers: dict[str, Any], kind: str, expected: type) -> None:
    loader = ours(NeverBegins(kind), **workers)
    for _ in range(2):
        with pytest.raises(expected, match=r"custom|StopIteration"):
            list(loader)


@pytest.mark.parametrize("workers", [FORK, KEPT], ids=["new", "persistent"])
@pytest.mark.parametrize("dataset", [Mapped(), Stream()], ids=["map", "iterable"])
def test_an_exception_of_worker_init_fn_is_raised_in_every_epoch(workers: dict[str, Any], dataset: Any) -> None:
    loader = ours(dataset, worker_init_fn=FailsAt(1, "custom"), **workers)
    for _ in range(2):
        with pytest.raises(CustomError) as caught:
            list(loader)
        assert caught.value.code > 0
        assert "worker 1" in "".join(caught.value.__notes__)


def test_a_stop_of_worker_init_fn_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(ours(Mapped(), worker_init_fn=FailsAt(0, "stop"), **FORK))


@both
@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Mapped(FailsAt(3, "stop")), list),
        (Mapped(), stopping_batch),
        (Stream(), stopping_batch),
        (Bulk("stop"), list),
    ],
    ids=["getitem", "collate", "collate stream", "getitems"],
)
def test_a_stop_is_an_error_and_never_a_shorter_epoch(workers: dict[str, Any], dataset: Any, collate: Any) -> None:
    times = 2 if workers and isinstance(dataset, IterableDataset) else 1
    expected = [x for x in ([0, 1], StageError, [4, 5], [6, 7]) for _ in range(times)]
    loader = ours(dataset, 2, collate_fn=collate, **workers)
    assert outcomes(loader) == expected
    with pytest.raises(StageError, match="StopIteration"):
        list(loader)


@both
def test_a_stop_in_a_generator_is_an_error_as_everywhere(workers: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(ours(Stream(FailsAt(3, "stop")), **workers))


@pytest.mark.parametrize("workers", [FORK, KEPT], ids=["new", "persistent"])
@pytest.mark.parametrize("dataset", [Mapped(lock_at_three), Stream(lock_at_three)], ids=["map", "iterable"])
def test_what_cannot_be_sent_is_an_error(workers: dict[str, Any], dataset: Any) -> None:
    loader = ours(dataset, None, **workers)
    for _ in range(2):
        got: list[Any] = []
        with pytest.raises(WorkerError, match="lock"):
            got.extend(loader)
        assert set(got) == {0, 1, 2}


def test_a_data_set_need_not_be_serialisable_for_a_fork_alone() -> None:
    def dataset(lock: Any) -> Any:
        return Mapped(lambda i: lock.locked() or i)

    assert list(ours(dataset(threading.Lock()), None, **FORK)) == list(range(8))
    for method in ("forkserver", "spawn"):
        loader = ours(dataset(threading.Lock()), None, num_workers=1, multiprocessing_context=method)
        with pytest.raises(WorkerError, match="lock"):
            list(loader)


def raising_a_lock(i: int) -> int:
    if i == 3:
        raise CustomError("lock", code=threading.Lock())  # type: ignore[arg-type]
    return i


def test_an_exception_that_cannot_be_sent_keeps_its_type() -> None:
    loader = ours(Mapped(raising_a_lock), None, **FORK)
    assert outcomes(loader) == [0, 1, 2, CustomError, 4, 5, 6, 7]


# -- stuck and dead workers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Mapped(Blocks(2)), Stream(Blocks(2))], ids=["map", "iterable"])
def test_a_stuck_worker_is_an_error_in_time(dataset: Any) -> None:
    loader = ours(dataset, timeout=0.5, **FORK)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.5 seconds") as caught:
        list(loader)
    assert isinstance(caught.value, TimeoutError)
    assert list(ours(Mapped(), None, timeout=60, **FORK)) == list(range(8))


def test_what_is_refused_when_an_epoch_begins() -> None:
    with pytest.raises(AssertionError, match="timeout"):
        iter(ours(Mapped(), timeout=1))
    with pytest.raises(AssertionError, match="prefetch_factor"):
        iter(ours(Mapped(), prefetch_factor=0, **FORK))


@pytest.mark.parametrize("workers", [FORK, KEPT], ids=["new", "persistent"])
@pytest.mark.parametrize("dataset", [Mapped(n=40), Sharded(n=40)], ids=["map", "iterable"])
@pytest.mark.parametrize("which", [[0], [1], [0, 1]], ids=str)
def test_an_epoch_goes_on_when_workers_are_killed(workers: dict[str, Any], dataset: Any, which: list[int]) -> None:
    expected = list(ours(dataset, 3, collate_fn=list, **FORK))
    loader = ours(dataset, 3, collate_fn=list, **workers)
    running: Any = iter(loader)
    got = [next(running) for _ in range(2)]
    for i in which:
        end(running._workers[i], signal.SIGKILL)
    assert got + list(running) == expected
    assert list(loader) == expected


def end(process: Any, how: int) -> None:
    os.kill(process.pid, how)
    process.join(timeout=10)
    assert not process.is_alive()
    assert process.exitcode == -how


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_persistent_workers_killed_between_epochs_are_replaced(method: str) -> None:
    loader = ours(range(20), None, num_workers=2, multiprocessing_context=method, persistent_workers=True)
    running: Any = iter(loader)
    assert list(running) == list(range(20))
    before = running._workers
    for process in before:
        end(process, signal.SIGTERM)
    assert list(loader) == list(range(20))
    assert not {w.pid for w in running._workers} & {w.pid for w in before}


@pytest.mark.parametrize("how", ["kill", "term", "exit"])
@pytest.mark.parametrize("style", [Mapped, Stream])
def test_a_sample_may_kill_its_worker_once(style: Any, how: str, tmp_path: Path) -> None:
    loader = ours(style(Kills(str(tmp_path), (3, 5), how)), None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == list(range(8))
    assert list(loader) == list(range(8))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("how", "message"), [("kill", "is killed by signal: Killed"), ("_exit", "exited unexpectedly")]
)
@pytest.mark.parametrize("style", [Mapped, Stream])
def test_a_sample_that_always_kills_its_worker_is_an_error(style: Any, how: str, message: str, tmp_path: Path) -> None:
    loader = ours(style(Kills(str(tmp_path), (5,), how, times=99)), None, num_workers=1, multiprocessing_context="fork")
    got: list[int] = []
    with pytest.raises(RuntimeError, match=rf"^DataLoader worker \(pid \d+\) {message}"):
        got.extend(loader)
    assert got == list(range(5))


def test_a_worker_that_dies_while_it_starts_is_replaced(tmp_path: Path) -> None:
    loader = ours(Mapped(), None, worker_init_fn=DiesAtStart(str(tmp_path)), **FORK)
    assert list(loader) == list(range(8))
    assert [x.name for x in tmp_path.iterdir()] == ["start"]


# -- lengths -----------------------------------------------------------------------------------------------------------


class Sized(Stream):
    """A stream that says how long it is, rightly or not."""

    def __init__(self, says: int, n: int) -> None:
        super().__init__(n=n)
        self.says = says

    def __len__(self) -> int:
        return self.says

    def __repr__(self) -> str:
        return "Sized"


@pytest.mark.parametrize(
    ("dataset", "options", "length"),
    [
        (Mapped(n=7), {}, 7),
        (Mapped(n=7), {"batch_size": 3}, 3),
        (Mapped(n=7), {"batch_size": 3, "drop_last": True}, 2),
        (Mapped(n=7), {"batch_size": None}, 7),
        (Mapped(n=7), {"batch_size": 3, "sampler": [1, 2, 3, 4]}, 2),
        (Mapped(n=7), {"batch_sampler": [[0, 1], [2]]}, 2),
        (Mapped(n=7), {"batch_sampler": BatchSampler(range(7), 2, drop_last=True)}, 3),
        (Mapped(n=0), {"shuffle": False}, 0),
        (Sized(7, 7), {}, 7),
        (Sized(7, 7), {"batch_size": 3}, 3),
        (Sized(7, 7), {"batch_size": 3, "drop_last": True}, 2),
        (Sized(7, 7), {"batch_size": None}, 7),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_the_length_is_that_of_the_epoch(dataset: Any, options: dict[str, Any], length: int, workers: int) -> None:
    method = "fork" if workers else None
    loader = ours(dataset, num_workers=workers, multiprocessing_context=method, **options)
    assert len(loader) == length
    assert len(list(loader)) == length
    assert len(loader) == len(TorchDataLoader(dataset, **options))


@pytest.mark.parametrize(
    ("dataset", "options"),
    [(Stream(), {}), (Mapped(), {"sampler": iter([1])}), (Mapped(), {"batch_sampler": iter([[1]])})],
    ids=["stream", "sampler", "batch sampler"],
)
def test_there_may_be_no_length(dataset: Any, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(ours(dataset, **options))


@both
def test_a_stream_longer_than_its_length_is_warned_of_if_that_was_asked_for(workers: dict[str, Any]) -> None:
    times = 2 if workers else 1
    loader = ours(Sized(3 * times, 5), None, **workers)
    assert len(list(loader)) == 5 * times
    assert len(loader) == 3 * times
    words = r"Length of IterableDataset Sized was reported to be \d.*when accessing len"
    with pytest.warns(UserWarning, match=words + (".*multiprocessing data-loading" if workers else "")) as caught:
        assert len(list(loader)) == 5 * times
    assert sum("Length of" in str(w.message) for w in caught) == 2 * times
    running = iter(loader)
    for _ in range(3 * times):
        next(running)
    with pytest.warns(UserWarning, match=words):
        next(running)


@both
@pytest.mark.parametrize("dataset", [Mapped(n=1), Mapped(n=0), Stream(n=1), Stream(n=0)], ids=["1", "0", "s1", "s0"])
def test_less_data_than_workers(workers: dict[str, Any], dataset: Any) -> None:
    times = 2 if workers and isinstance(dataset, IterableDataset) else 1
    assert list(ours(dataset, None, **workers)) == list(range(dataset.n)) * times


# -- looking ahead -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [FORK, KEPT], ids=["new", "persistent"])
@pytest.mark.parametrize(("factor", "size"), [(2, 1), (3, 2), (1, 3), (None, 2)])
def test_a_sampler_is_drawn_as_far_ahead_as_was_asked(workers: dict[str, Any], factor: int | None, size: int) -> None:
    sampler = Asked(60)
    loader = ours(Mapped(n=60), size, sampler=sampler, prefetch_factor=factor, **workers)
    ahead = 2 * (factor or 2)
    for _ in range(2):
        sampler.count = 0
        running = iter(loader)
        assert sampler.count == size * ahead
        for i in range(1, 6):
            next(running)
            assert sampler.count == size * (ahead + i)


@pytest.mark.parametrize("size", [1, 4])
def test_without_workers_nothing_is_drawn_ahead(size: int) -> None:
    sampler, asked = Asked(60), Counts()
    running = iter(ours(asked, size, sampler=sampler, collate_fn=list))
    for i in range(1, 3):
        assert (sampler.count, asked.asked) == ((i - 1) * size, (i - 1) * size)
        next(running)


@pytest.mark.parametrize("style", [Mapped, Stream])
@pytest.mark.parametrize(("factor", "size"), [(2, 1), (1, 3)])
def test_workers_load_no_further_ahead_than_was_asked(style: Any, factor: int, size: int, tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    running: Any = iter(ours(style(notes, n=600), size, prefetch_factor=factor, **FORK))
    for _ in range(4):
        next(running)
    processes = running._workers
    del running
    for w in processes:
        w.join(timeout=10)
    assert 4 * size <= len(notes.calls) <= (4 + 2 * factor) * size


@pytest.mark.parametrize("dataset", [Mapped(n=40), Sharded(n=40)], ids=["map", "iterable"])
@pytest.mark.parametrize("workers", [FORK, KEPT], ids=["new", "persistent"])
def test_out_of_order_nothing_is_lost_or_doubled(dataset: Any, workers: dict[str, Any]) -> None:
    loader = ours(dataset, 3, collate_fn=list, in_order=False, **workers)
    for _ in range(2):
        assert sorted(samples_of(loader)) == list(range(40))


class Gate:
    """Let 0 through in worker 0 when it is opened, and the others at once."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()

    def __call__(self, i: int) -> int:
        info = get_worker_info()
        if i == 0 and info is not None and info.id == 0:
            os.read(self.reads, 1)
        return i

    def open(self) -> None:
        os.write(self.writes, b"!")


@pytest.mark.parametrize(("style", "times"), [(Mapped, 1), (Stream, 2)], ids=["map", "iterable"])
def test_out_of_order_a_slow_worker_is_not_waited_for(style: Any, times: int) -> None:
    gate = Gate()
    running = iter(ours(style(gate), None, in_order=False, timeout=20, **FORK))
    got = [next(running) for _ in range(3)]
    gate.open()
    assert sorted([*got, *running]) == sorted(list(range(8)) * times)
    os.close(gate.reads)
    os.close(gate.writes)


def test_out_of_order_a_sampler_is_drawn_no_further_ahead() -> None:
    sampler = Asked(3000)
    running = iter(ours(Mapped(n=3000), sampler=sampler, in_order=False, **FORK))
    for received in range(200):
        assert sampler.count <= received + 4
        next(running)


def test_in_order_means_nothing_without_workers() -> None:
    assert list(ours(Mapped(), None, in_order=False)) == list(range(8))


# -- what a loader is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_cannot_be_changed_later(name: str) -> None:
    loader = ours(Mapped(), 2)
    before = getattr(loader, name)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
        setattr(loader, name, before)
    assert getattr(loader, name) is before


def test_what_may_be_changed_later(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    loader = ours(Mapped(pid_of, n=4), 2, collate_fn=set, **FORK)
    assert len(set.union(*loader)) == 2
    loader.num_workers, loader.worker_init_fn = 1, notes
    assert len(set.union(*loader)) == 1
    assert notes.calls == ["0"]
    loader.num_workers, loader.collate_fn = 0, tuple
    assert list(loader) == [(os.getpid(),) * 2] * 2


@pytest.mark.parametrize("method", METHODS)
def test_a_context_may_be_named_or_given(method: str) -> None:
    context = multiprocessing.get_context(method)
    named, given = (ours(Mapped(), num_workers=1, multiprocessing_context=x) for x in (method, context))
    assert named.multiprocessing_context.get_start_method() == method
    assert given.multiprocessing_context is context


def test_a_context_given_is_used() -> None:
    loader = ours(Mapped(pid_of), None, num_workers=1, multiprocessing_context=multiprocessing.get_context("fork"))
    assert os.getpid() not in set(loader)
    loader.multiprocessing_context = "fork"
    assert os.getpid() not in set(loader)


@pytest.mark.parametrize(("method", "parent"), [("fork", True), ("forkserver", False)])
def test_without_a_context_it_is_that_of_multiprocessing(method: str, parent: bool) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        (above,) = ours(range(1), collate_fn=lambda _: os.getppid(), num_workers=1)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert (above == os.getpid()) is parent


@pytest.mark.parametrize(
    ("workers", "context", "error", "words"),
    [
        (1, "bad", ValueError, "should specify a valid start method in .* got multiprocessing_context='bad'"),
        (1, object(), TypeError, "should be a valid context object or a string"),
        (0, "fork", ValueError, "can only be used with multi-process loading"),
    ],
)
def test_a_wrong_context_is_refused(workers: int, context: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ours(Mapped(), num_workers=workers, multiprocessing_context=context)
    loader = ours(Mapped(), num_workers=workers)
    with pytest.raises(error, match=words):
        loader.multiprocessing_context = context


def test_it_is_torchs_loader_to_whoever_asks() -> None:
    loader: Any = ours(Mapped(), 3, **FORK)
    assert isinstance(loader, TorchDataLoader)
    assert issubclass(DataLoader, TorchDataLoader)
    assert list(DataLoader[int](Mapped(n=2), None)) == [0, 1]
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor, loader.timeout) == (3, 2, 2, 0)
    assert isinstance(loader.sampler, torch.utils.data.SequentialSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert loader.collate_fn is default_collate
    assert len(loader) == 3


@all_three
@pytest.mark.parametrize("received", [0, 2, LIMIT])
def test_a_copy_begins_an_epoch_of_its_own(workers: dict[str, Any], received: int) -> None:
    loader = ours(Mapped(), 3, collate_fn=list, shuffle=True, generator=seeded(5), **workers)
    running = iter(loader) if received else None
    for _ in zip(range(received), running or ()):
        pass
    if not (workers.get("persistent_workers") and received):
        again = pickle.loads(pickle.dumps(loader))
        assert type(again) is DataLoader
        assert sorted(samples_of(again)) == list(range(8))
    copied = copy.copy(loader)
    assert copied.dataset is loader.dataset
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        copied.batch_size = 1
    assert sorted(samples_of(copied)) == list(range(8))
    assert sorted(samples_of(loader)) == list(range(8))


def test_more_workers_than_processors_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._utils.cpu_count", lambda: 1)
    with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes in total"):
        loader = ours(Mapped(), None, **FORK)
    with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes in total"):
        assert list(loader) == list(range(8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_data_pipes_are_left_to_torch() -> None:
    loader = ours(IterableWrapper(range(5)).map(float), 2, collate_fn=list)
    assert list(loader) == [[0.0, 1.0], [2.0, 3.0], [4.0]]


def test_an_iterator_has_the_length_of_its_loader() -> None:
    assert len(iter(ours(Mapped(), 3))) == 3


def test_an_iterator_cannot_be_pickled() -> None:
    with pytest.raises(NotImplementedError):
        pickle.dumps(iter(ours(Mapped())))


@both
def test_two_iterators_of_a_loader_are_independent(workers: dict[str, Any]) -> None:
    loader = ours(Mapped(), 3, collate_fn=list, **workers)
    whole = list(loader)
    assert [a for a, b in zip(loader, loader) if a == b] == whole
    first = iter(loader)
    got = [next(first)]
    assert list(loader) == whole
    assert got + list(first) == whole


def pairs(cls: type[TorchDataLoader[Any]], **options: Any) -> list[Any]:
    torch.manual_seed(11)
    with warnings.catch_warnings():
        if cls is TorchDataLoader:
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        loader = cls(Mapped(drawn_by_torch), 3, shuffle=True, collate_fn=list, **options)
        return list(zip(loader, loader))


def drawn_by_torch(i: int) -> tuple[int, float]:
    return i, float(torch.rand(()))


@both
def test_two_iterators_at_once_draw_as_torchs_do(workers: dict[str, Any]) -> None:
    assert pairs(DataLoader, **workers) == pairs(TorchDataLoader, **workers)


def test_a_loader_in_the_loop_of_another() -> None:
    outer, inner = (ours(Mapped(n=n), None, **FORK) for n in (3, 2))
    assert [(i, j) for i in outer for j in inner] == [(i, j) for i in range(3) for j in range(2)]


def test_threads_may_each_have_a_loader() -> None:
    got: dict[int, list[int]] = {}

    def run(i: int) -> None:
        got[i] = [list(ours(Mapped(n=20 + i), None, **FORK)) for _ in range(2)][1]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: list(range(20 + i)) for i in range(3)}


def test_batches_are_held_without_a_descriptor_each() -> None:
    running = iter(ours(Mapped(rows, n=402), 2, **FORK))
    held = [next(running)]
    before = len(os.listdir("/proc/self/fd"))
    held += [next(running) for _ in range(200)]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert list(running) == []
    del running  # the batches outlive their workers
    held[7][0].zero_()
    assert [int(x[1, -1]) for x, _ in held] == [*range(1, 15, 2), 0, *range(17, 403, 2)]
    assert [int(y[0, 0]) for _, y in held] == [-i for i in range(0, 402, 2)]


def rows(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((1000,), i), torch.full((1000,), -i)


# -- torch's data sets -------------------------------------------------------------------------------------------------


class Doubling(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class InBulk(TensorDataset):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(x, -1) for x in self.tensors[0][indices]]


class Named(Dataset[Any]):
    """Keys that are no numbers."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: Any) -> str:
        return f"{key}!"


FLOATS, INTEGERS = torch.arange(24.0).reshape(8, 3), torch.arange(8)
DTYPES = (torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
TENSORS = TensorDataset(FLOATS, INTEGERS)
DATASETS: dict[str, Any] = {
    "list": [[1.0, 2], [3.0, 4], [5.0, 6]],
    "range": range(5),
    "array": np.arange(12.0).reshape(6, 2),
    "tensor": FLOATS,
    "Subset": Subset(Mapped(float), [5, 3, 1, 0, 2]),
    "Subset of Subset": Subset(Subset(TENSORS, [7, 5, 3, 1, 0, 2]), [5, 4, 0, 2]),
    "ConcatDataset": ConcatDataset([TENSORS, [(torch.zeros(3), torch.tensor(5))] * 3]),  # type: ignore[list-item]
    "StackDataset": StackDataset(Mapped(), TENSORS),
    "StackDataset of names": StackDataset(x=Mapped(float), y=TENSORS),
    "TensorDataset": TENSORS,
    "TensorDataset of one": TensorDataset(INTEGERS),
    "TensorDataset of dtypes": TensorDataset(*(FLOATS.to(dtype) for dtype in DTYPES)),
    "TensorDataset of views": TensorDataset(FLOATS.T.contiguous().T, INTEGERS.expand(8, 8), FLOATS[:, :0]),
    "Doubling": Doubling(FLOATS, INTEGERS),
    "InBulk": InBulk(FLOATS),
}


@both
@pytest.mark.parametrize("name", DATASETS)
def test_torchs_data_sets_give_what_they_give_to_torch(workers: dict[str, Any], name: str) -> None:
    assert_same_batches(DATASETS[name], workers, batch_size=2, shuffle=True)


@both
def test_chained_streams(workers: dict[str, Any]) -> None:
    assert_like_torch(ChainDataset([Sharded(drawn, n=9), Stream(drawn, n=3)]), batch_size=2, **workers)


@both
@pytest.mark.parametrize(
    "options",
    [
        {"sampler": [3, 0, 3]},
        {"sampler": [-1, -8, 2], "batch_size": 2},
        {"sampler": torch.tensor([5, 1, 2]), "batch_size": 2},
        {"sampler": np.array([5, 1, 2]), "batch_size": 2},
        {"sampler": [True, False], "batch_size": 2},
        {"sampler": [[1, 2], [0, 3, 4]], "batch_size": None},
        {"sampler": [slice(2, 5), 7], "batch_size": None},
        {"batch_sampler": [[1, 2], (0, 3, 4), [6]]},
        {"batch_sampler": [torch.tensor([1, 2]), np.array([3, 4])]},
        {"batch_sampler": [[torch.tensor(1), torch.tensor(2)], [np.int32(4)]]},
        {"sampler": [1, 8, 2], "batch_size": 2},
        {"sampler": [1, "no", 2], "batch_size": 2},
    ],
    ids=str,
)
def test_samplers_may_give_any_index(workers: dict[str, Any], options: dict[str, Any]) -> None:
    assert_same_batches(TENSORS, workers, **options)


class Eager(Sampler[Any]):
    """Draws when it is asked for an iterator, and not when that is asked."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(8)
        return iter(order.tolist() if self.size is None else order.reshape(-1, self.size).tolist())


@all_three
@pytest.mark.parametrize(
    "options",
    [
        {"sampler": Eager(), "batch_size": 3},
        {"sampler": Eager(), "batch_size": None},
        {"batch_sampler": Eager(2)},
        {"sampler": RandomSampler(range(8), replacement=True, num_samples=5), "batch_size": 3},
        {"sampler": WeightedRandomSampler([0.1, 0.2, 0.7], 6), "batch_size": 3},
        {"sampler": SubsetRandomSampler([1, 3, 5]), "batch_size": 2},
    ],
    ids=["batched", "single", "batches", "RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler"],
)
def test_samplers_draw_as_for_torch(workers: dict[str, Any], options: dict[str, Any]) -> None:
    assert_like_torch(Mapped(), **options, **workers)


@both
def test_samplers_may_be_iterators(workers: dict[str, Any]) -> None:
    loader = ours(Mapped(), 2, sampler=(i for i in (3, 1, 2)), collate_fn=list, **workers)
    assert [list(loader), list(loader)] == [[[3, 1], [2]], []]
    assert list(ours(Mapped(), batch_sampler=iter([(3, 1), [2]]), collate_fn=list, **workers)) == [[3, 1], [2]]


@both
def test_indices_need_not_be_numbers(workers: dict[str, Any]) -> None:
    assert list(ours(Named(), 2, sampler=["a", ("b", 1), None], **workers)) == [["a!", "('b', 1)!"], ["None!"]]


def test_gradients_go_through_batches_that_are_made_here() -> None:
    x = torch.arange(6.0, requires_grad=True)
    for dataset in (TensorDataset(x), Mapped(lambda i: (x[i],), n=6)):
        total = sum((batch * batch).sum() for (batch,) in ours(dataset, 2))
        assert torch.autograd.grad(total, x)[0].tolist() == [0, 2, 4, 6, 8, 10]


def test_a_history_of_gradients_cannot_leave_a_worker() -> None:
    with pytest.raises(WorkerError, match="detach"):
        list(ours(TensorDataset(torch.ones(4, requires_grad=True)), 2, **FORK))


@pytest.mark.parametrize("fmt", [torch.channels_last, torch.contiguous_format], ids=["channels last", "transposed"])
def test_a_memory_format_survives_the_way_from_a_worker(fmt: torch.memory_format) -> None:
    image = torch.rand(2, 3, 4, 4).to(memory_format=fmt)
    sent = image.mT if fmt == torch.contiguous_format else image
    (got,) = ours([sent], None, **FORK)
    assert torch.equal(got, sent)
    assert got.stride() == sent.stride()


# -- collation ---------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


class Bag(dict[str, Any]):
    """A mapping with something of its own."""

    label = "none"


class Row(list[Any]):
    pass


class Odd:
    """What no rule is for."""

    def __init__(self, x: int) -> None:
        self.x = x


ONE, TWO = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
SAMPLES: dict[str, tuple[Any, Any]] = {
    "integers": (1, 2),
    "floats": (1.5, 2),
    "booleans": (True, False),
    "strings": ("a", "b"),
    "bytes": (b"a", b"b"),
    "nothing": (None, None),
    "complex": (1j, 2j),
    "NumPy's floats": (np.float32(1), np.float32(2)),
    "NumPy's integers": (np.int16(1), np.int16(2)),
    "NumPy's booleans": (np.bool_(True), np.bool_(False)),
    "arrays": (np.arange(3), np.arange(3) + 1),
    "arrays of floats": (np.ones((2, 2), np.float16), np.zeros((2, 2), np.float16)),
    "arrays of no dimension": (np.array(1.0), np.array(2.0)),
    "arrays of nothing": (np.empty((0, 2)), np.empty((0, 2))),
    "arrays of strings": (np.array(["a"]), np.array(["b"])),
    "arrays of objects": (np.array([None]), np.array([None])),
    "arrays of times": (np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-01"], "M8[D]")),
    "arrays of another byte order": (np.arange(3, dtype=">i4"), np.arange(3, dtype=">i4")),
    "arrays of other dtypes": (np.arange(3), np.arange(3.0)),
    "arrays of other shapes": (np.arange(3), np.arange(4)),
    "views of arrays": (np.arange(12).reshape(3, 4)[:, ::2], np.arange(12).reshape(3, 4)[:, ::2]),
    "tensors": (ONE, TWO),
    "tensors of no dimension": (torch.tensor(1), torch.tensor(2)),
    "tensors of nothing": (torch.empty(0), torch.empty(0)),
    "tensors of other dtypes": (ONE, torch.tensor([1, 2])),
    "tensors of other shapes": (ONE, torch.ones(3)),
    "bfloat16": (ONE.bfloat16(), TWO.bfloat16()),
    "complex tensors": (ONE + 1j, TWO + 2j),
    "conjugates": ((ONE + 1j).conj(), (TWO + 2j).conj()),
    "transposed": (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T),
    "expanded": (torch.ones(1).expand(3), torch.ones(1).expand(3)),
    "sparse": (ONE.to_sparse(), TWO.to_sparse()),
    "tuples": ((1, "a"), (2, "b")),
    "lists": ([1, ONE], [2, TWO]),
    "lists of other lengths": ([1], [1, 2]),
    "empty lists": ([], []),
    "named tuples": (Point(1, ONE), Point(2, TWO)),
    "dicts": ({"x": 1, "y": (ONE, "a")}, {"x": 2, "y": (TWO, "b")}),
    "dicts of other keys": ({"x": 1}, {"y": 1}),
    "ordered dicts": (collections.OrderedDict(b=1, a=2), collections.OrderedDict(b=3, a=4)),
    "dicts with defaults": (
        collections.defaultdict[str, Any](list, a=1),
        collections.defaultdict[str, Any](list, a=2),
    ),
    "own mappings": (Bag(x=1), Bag(x=2)),
    "own sequences": (Row([1, 2]), Row([3, 4])),
    "deep": ({"a": [Point({"b": (ONE, 1)}, "c")]}, {"a": [Point({"b": (TWO, 2)}, "d")]}),
    "no rule": (Odd(1), Odd(2)),
}


@both
def test_default_collation_is_torchs(workers: dict[str, Any]) -> None:
    assert_same_batches([x for pair in SAMPLES.values() for x in pair], workers, batch_size=2)


@both
def test_default_conversion_is_torchs(workers: dict[str, Any]) -> None:
    samples = [pair[0] for name, pair in SAMPLES.items() if name != "no rule"]
    assert_same_batches(samples, workers, batch_size=None)


@both
def test_samples_of_other_shapes_are_told_of_as_by_torch(workers: dict[str, Any]) -> None:
    for sample in (torch.ones, np.ones):
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size, but got"):
            list(ours([sample(2), sample(3)], 2, **workers))


def collated_twice(samples: list[Any]) -> dict[str, Any]:
    return {"tensors": default_collate(samples), "first": default_collate(samples[:1]), "points": Point(*samples)}


@all_three
def test_default_collate_inside_a_custom_collate_fn(workers: dict[str, Any]) -> None:
    dataset = Mapped(lambda i: (torch.full((2,), i), {"y": np.full(3, i)}))
    assert_same_batches(dataset, workers, batch_size=2, collate_fn=collated_twice)


class Scaled:
    """A collate function with a state."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __call__(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) * self.scale

    def method(self, samples: list[int]) -> list[int]:
        return [self.scale * x for x in samples]


@both
def test_collate_fn_may_be_any_callable(workers: dict[str, Any]) -> None:
    assert [x.tolist() for x in ours(Mapped(n=3), 2, collate_fn=Scaled(3), **workers)] == [[0, 3], [6]]
    assert list(ours(Mapped(n=3), 2, collate_fn=Scaled(3).method, **workers)) == [[0, 3], [6]]
    assert list(ours(Mapped(n=3), 2, collate_fn=lambda xs: -sum(xs), **workers)) == [-1, -2]
    assert list(ours(Mapped(n=3), None, collate_fn=lambda x: -x, **workers)) == [0, -1, -2]


def odds_together(batch: list[Odd], **_: Any) -> list[int]:
    return [odd.x for odd in batch]


def tensors_listed(batch: list[torch.Tensor], **_: Any) -> list[Any]:
    return ["mine", *(x.tolist() for x in batch)]


@both
def test_users_may_add_rules_to_default_collate(workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, Odd, odds_together)
    assert list(ours(Mapped(lambda i: {"odd": Odd(i)}, n=3), 2, **workers)) == [{"odd": [0, 1]}, {"odd": [2]}]


@both
def test_users_may_replace_rules_of_default_collate(workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, tensors_listed)
    assert list(ours(list(INTEGERS[:3]), 2, **workers)) == [["mine", 0, 1], ["mine", 2]]


@both
def test_users_rules_hold_for_a_tensor_dataset(workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, tensors_listed)
    assert list(ours(TensorDataset(INTEGERS[:3]), 2, **workers)) == [[["mine", 0, 1]], [["mine", 2]]]


# -- pinning -----------------------------------------------------------------------------------------------------------


class PinsItself:
    """A type with its own idea of pinning."""

    def __init__(self, samples: list[Any], pinned_in: int | None = None) -> None:
        self.samples, self.pinned_in = samples, pinned_in

    def pin_memory(self) -> PinsItself:
        return PinsItself(self.samples, os.getpid())


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is one; what is pinned is the negative."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: -tensor)


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "tensor": (ONE, -ONE),
    "list": ([ONE, 2], [-ONE, 2]),
    "own list": (Row([ONE, 2]), Row([-ONE, 2])),
    "tuple": ((ONE, "a"), (-ONE, "a")),
    "named tuple": (Point(ONE, b"y"), Point(-ONE, b"y")),
    "dict": ({"x": ONE, "y": {"z": [ONE]}}, {"x": -ONE, "y": {"z": [-ONE]}}),
    "ordered dict": (collections.OrderedDict(b=ONE, a=None), collections.OrderedDict(b=-ONE, a=None)),
    "own mapping": (Bag(x=ONE), Bag(x=-ONE)),
    "text": ("text", "text"),
    "nothing": (None, None),
}


@both
@pytest.mark.usefixtures("accelerator")
def test_tensors_are_pinned_in_any_container(workers: dict[str, Any]) -> None:
    loader = ours([x for x, _ in CONTAINERS.values()], None, collate_fn=untouched, pin_memory=True, **workers)
    assert plain(list(loader)) == plain([x for _, x in CONTAINERS.values()])


@all_three
@pytest.mark.usefixtures("accelerator")
def test_what_is_collated_is_pinned(workers: dict[str, Any]) -> None:
    loader = ours(TENSORS, 3, pin_memory=True, **workers)
    for _ in range(2):
        assert [y.tolist() for _, y in loader] == [[0, -1, -2], [-3, -4, -5], [-6, -7]]


@both
@pytest.mark.usefixtures("accelerator")
def test_a_custom_type_pins_itself_in_this_process(workers: dict[str, Any]) -> None:
    loader = ours(Mapped(n=3), 2, collate_fn=PinsItself, pin_memory=True, **workers)
    assert [(x.samples, x.pinned_in) for x in loader] == [([0, 1], os.getpid()), ([2], os.getpid())]
    kept = ours(Mapped(n=3), 2, collate_fn=PinsItself, **workers)
    assert [x.pinned_in for x in kept] == [None, None]


class Unpinnable(PinsItself):
    def pin_memory(self) -> PinsItself:
        raise CustomError("pin", code=1)


@both
@pytest.mark.usefixtures("accelerator")
def test_an_exception_of_pinning_is_the_users_own(workers: dict[str, Any]) -> None:
    loader = ours(Mapped(n=3), 2, collate_fn=Unpinnable, pin_memory=True, **workers)
    assert outcomes(loader) == [CustomError, CustomError]


@both
@pytest.mark.usefixtures("no_accelerator")
def test_without_an_accelerator_pinning_is_warned_of_and_left_out(workers: dict[str, Any]) -> None:
    loader = ours(Mapped(n=3), 2, collate_fn=PinsItself, pin_memory=True, **workers)
    with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator is found") as caught:
        assert [x.pinned_in for x in loader] == [None, None]
    assert sum("accelerator" in str(w.message) for w in caught) == 1


@pytest.mark.usefixtures("accelerator")
def test_pin_memory_device_is_deprecated() -> None:
    loader = ours(Mapped(n=3), 2, pin_memory=True, pin_memory_device="cuda")
    with pytest.warns(UserWarning, match="pin_memory_device is deprecated"):
        assert [x.tolist() for x in loader] == [[0, -1], [-2]]


# -- ranks -------------------------------------------------------------------------------------------------------------


def of_ranks(cls: type[TorchDataLoader[Any]], **options: Any) -> list[list[list[int]]]:
    """Two epochs of each of two ranks."""
    out = []
    with warnings.catch_warnings():
        if cls is TorchDataLoader:
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        for rank in range(2):
            sampler: Any = DistributedSampler(Mapped(n=11), num_replicas=2, rank=rank, seed=4)
            loader = cls(Mapped(n=11), 2, sampler=sampler, collate_fn=list, **options)
            epochs: list[list[int]] = []
            for epoch in range(2):
                sampler.set_epoch(epoch)
                epochs.append(samples_of(loader))
            out.append(epochs)
    return out


@all_three
def test_a_distributed_sampler_divides_each_epoch_anew(workers: dict[str, Any]) -> None:
    ranks = of_ranks(DataLoader, **workers)
    for epoch in range(2):
        assert set(ranks[0][epoch]) | set(ranks[1][epoch]) == set(range(11))
        assert len(ranks[0][epoch]) == len(ranks[1][epoch]) == 6
    assert ranks[0][0] != ranks[0][1]
    assert ranks == of_ranks(TorchDataLoader, **workers)
