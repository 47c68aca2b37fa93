"""Sources: anything with random access, any stream, and columns."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from pipes import (
    Source,
    StageError,
    batch,
    collate,
    filter,
    from_arrays,
    from_iterable,
    from_map,
    map,
    pipe,
    repeat,
    sample,
    shard_by_worker,
    shuffle_buffer,
    shuffled,
    skip,
    take,
)

# -- from_map ----------------------------------------------------------------------------------------------------------


class Squares(Dataset[int]):
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getitem__(self, i: int) -> int:
        self.asked.append(i)
        return i * i

    def __len__(self) -> int:
        return 10


class Bulk(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []

    def __getitems__(self, keys: list[int]) -> list[int]:
        self.calls.append(keys)
        return [k * k for k in keys]


class OnlySingleOverridden(Bulk):
    def __getitem__(self, i: int) -> int:
        return -i


class BothOverridden(OnlySingleOverridden):
    def __getitems__(self, keys: list[int]) -> list[int]:
        self.calls.append(keys)
        return [-k for k in keys]


class BulkSwitchedOff(Bulk):
    __getitems__ = None  # type: ignore[assignment]


def memmapped(folder: Path) -> np.memmap[Any, Any]:
    array = np.memmap(folder / "data", np.int32, "w+", shape=(4, 2))
    array[:] = np.arange(8).reshape(4, 2)
    return array


@pytest.mark.parametrize(
    ("dataset", "elements"),
    [
        ([1, None, "a"], [1, None, "a"]),
        ((1, 2), [1, 2]),
        ("ab", ["a", "b"]),
        (range(3), [0, 1, 2]),
        ({"x": 1, 3: None}, [1, None]),
        (collections.OrderedDict(b=1, a=2), [1, 2]),
        (np.array([1.5, 2.5]), [1.5, 2.5]),
        (TensorDataset(torch.arange(2)), [(torch.tensor(0),), (torch.tensor(1),)]),
        (Subset(Squares(), [3, 1]), [9, 1]),
        (Squares(), [i * i for i in range(10)]),
        ([], []),
        ({}, []),
    ],
    ids=lambda x: type(x).__name__,
)
def test_from_map_reads_anything_with_access_and_length(dataset: Any, elements: list[Any]) -> None:
    p = pipe(from_map(dataset))
    assert list(p) == elements == list(pipe(dataset))
    assert len(p) == len(elements)
    assert [p[i] for i in range(len(p))] == elements


def test_from_map_reads_rows_of_arrays_and_memmaps(tmp_path: Path) -> None:
    for array in (np.arange(8, dtype=np.int32).reshape(4, 2), memmapped(tmp_path)):
        p = pipe(from_map(array), sample([3, 0]))
        rows = list(p)
        assert np.array_equal(rows, [[6, 7], [0, 1]])
        assert all(isinstance(r, np.ndarray) and r.dtype == np.int32 for r in rows)
        rows[0][:] = 99
        assert np.array_equal(array[3], [6, 7])


@pytest.mark.parametrize(
    ("dataset", "keys", "elements"),
    [
        ({"a": 1, "b": 2}, ["b", "a", "b"], [2, 1, 2]),
        ({(0, "x"): 1, None: 2}, [None, (0, "x")], [2, 1]),
        ({"a": 1, "b": 2}, "ba", [2, 1]),
        ({5: 1, 7: 2}, np.array([7, 5]), [2, 1]),
        ({5: 1, 7: 2}, (k for k in [7, 5]), [2, 1]),
        ({1.5: 1}, {1.5}, [1]),
        ([10, 11, 12], [2, 0], [12, 10]),
        (np.array([10, 11, 12]), [2, 0], [12, 10]),
        (collections.defaultdict(list, a=[1]), ["a", "zz"], [[1], []]),
        ({"a": 1}, [], []),
    ],
    ids=repr,
)
def test_keys_may_be_of_any_type(dataset: Any, keys: Any, elements: list[Any]) -> None:
    p = pipe(from_map(dataset, keys=keys))
    assert list(p) == elements == list(p)
    assert len(p) == len(elements)


@pytest.mark.parametrize("stages", [[], [sample(shuffled())], [sample(np.array([3, 1])), batch(2)]], ids=repr)
@pytest.mark.parametrize("keys", [None, np.arange(10), list(range(10))], ids=["positions", "array", "list"])
def test_data_sets_get_plain_ints(stages: list[Any], keys: Any) -> None:
    for dataset in (Squares(), Bulk()):
        list(pipe(from_map(dataset, keys=keys), *stages))
        asked = dataset.asked + [k for call in getattr(dataset, "calls", []) for k in call]
        assert asked
        assert {type(k) for k in asked} == {int}


def test_a_whole_batch_reaches_the_source_in_one_call() -> None:
    dataset = Bulk()
    assert list(pipe(from_map(dataset), batch(4))) == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    assert dataset.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert dataset.asked == []


@pytest.mark.parametrize(
    "stages",
    [
        [sample(shuffled()), batch(5)],
        [shuffle_buffer(3), batch(5)],
        [take(10), skip(0), batch(5)],
        [map(abs), batch(5)],
        [batch(1), batch(5)],
        [repeat(1), shuffle_buffer(4), batch(5), map(len)],
        [sample([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])],
        [sample(lambda n: iter([[0, 1, 2, 3, 4], list(range(5, n))]))],
    ],
    ids=repr,
)
def test_a_batch_is_one_call_behind_any_order_and_window(stages: list[Any]) -> None:
    dataset = Bulk()
    p = pipe(from_map(dataset), *stages)
    list(p)
    assert [len(call) for call in dataset.calls] == [5, 5]
    assert sorted(itertools.chain.from_iterable(dataset.calls)) == list(range(10))
    assert dataset.asked == []


def test_one_element_is_one_call_and_nothing_is_read_twice() -> None:
    dataset = Bulk()
    assert pipe(from_map(dataset), sample(shuffled()), batch(3))[1]
    assert [len(call) for call in dataset.calls] == [3]


def test_elements_behind_a_filter_are_fetched_one_by_one_so_that_a_fault_changes_no_draw_before_it() -> None:
    dataset = Bulk()
    list(pipe(from_map(dataset), filter(bool)))
    assert dataset.calls == [[i] for i in range(10)]


@pytest.mark.parametrize(
    ("dataset", "bulk"),
    [(Bulk(), True), (OnlySingleOverridden(), False), (BothOverridden(), True), (BulkSwitchedOff(), False)],
    ids=lambda x: type(x).__name__,
)
def test_bulk_access_is_used_unless_a_subclass_overrides_only_single_access(dataset: Any, bulk: bool) -> None:
    wanted = [dataset[i] for i in range(10)]
    assert list(pipe(from_map(dataset), batch(10))) == [wanted]
    assert dataset.calls == ([list(range(10))] if bulk else [])


def test_bulk_access_gets_the_keys() -> None:
    dataset = Bulk()
    assert list(pipe(from_map(dataset, keys=[7, 3]), batch(2))) == [[49, 9]]
    assert dataset.calls == [[7, 3]]


def test_bulk_answers_may_be_any_iterable() -> None:
    class Lazy(Bulk):
        def __getitems__(self, keys: list[int]) -> Any:
            return (k * k for k in keys)

    assert list(pipe(from_map(Lazy()), batch(2), take(1))) == [[0, 1]]


# -- from_iterable -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 3


def numbers() -> Iterator[int]:
    yield from range(3)


@pytest.mark.parametrize(
    "source",
    [
        from_iterable([0, 1, 2]),
        from_iterable(range(3)),
        from_iterable(numbers),
        from_iterable(lambda: [0, 1, 2]),
        from_iterable({0: "a", 1: "b", 2: "c"}),
        from_iterable(Stream()),
        from_iterable(SizedStream()),
        Stream(),
        SizedStream(),
        {0, 1, 2},
        {0: "a", 1: "b", 2: "c"}.keys(),
    ],
    ids=lambda source: type(source).__name__,
)
def test_a_stream_is_read_afresh_in_each_run(source: Any) -> None:
    p = pipe(source)
    assert list(p) == [0, 1, 2] == list(p)
    assert list(pipe(p, repeat(2))) == [0, 1, 2, 0, 1, 2]
    assert list(pipe(p, shard_by_worker(2))) == [0, 1, 2]


def test_two_runs_of_a_stream_at_once_are_independent() -> None:
    p = pipe(from_iterable(numbers))
    assert list(zip(p, p, strict=True)) == [(0, 0), (1, 1), (2, 2)]


def test_a_factory_with_rng_follows_seed_and_epoch() -> None:
    def noise(rng: np.random.Generator) -> Iterator[int]:
        while True:
            yield int(rng.integers(2**40))

    p = pipe(from_iterable(noise), take(20))
    assert list(p) == list(p)
    runs = [tuple(p.seeded(s).at_epoch(e)) for s in range(3) for e in range(3)]
    assert len(set(itertools.chain.from_iterable(runs))) == 9 * 20
    assert list(pipe(p, repeat(2))) == [*p, *p.at_epoch(1)]


def test_a_factory_with_rng_gets_one_per_part() -> None:
    from pipes import concat

    def noise(rng: np.random.Generator) -> list[int]:
        return [int(x) for x in rng.integers(2**40, size=5)]

    assert len(set(concat(from_iterable(noise), from_iterable(noise)))) == 10


def test_a_stream_is_drawn_only_as_it_is_asked_for() -> None:
    drawn: list[int] = []

    def counted() -> Iterator[int]:
        for i in itertools.count():
            drawn.append(i)
            yield i

    p = pipe(from_iterable(counted), map(abs))
    run = iter(p)
    assert drawn == []
    next(run)
    assert drawn == [0]
    assert list(pipe(p, take(3))) == [0, 1, 2]
    assert drawn == [0, 0, 1, 2]


@pytest.mark.parametrize("once", [lambda: iter([1, 2]), lambda: (x for x in [1, 2]), lambda: map(abs)([1, 2])])
def test_a_one_shot_iterator_runs_once(once: Any) -> None:
    p = pipe(once())
    assert list(p) == [1, 2]
    with pytest.raises(StageError, match="one-shot"):
        list(p)
    extended = pipe(once(), map(str))
    assert list(extended) == ["1", "2"]


def test_a_one_shot_iterator_is_shared_by_the_pipelines_made_of_it() -> None:
    p = pipe(iter([1, 2]))
    assert list(pipe(p, map(str))) == ["1", "2"]
    with pytest.raises(StageError, match="one-shot"):
        list(pipe(p, map(abs)))


def test_an_open_file_is_a_one_shot_stream_of_lines(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("a\nb\n")
    with (tmp_path / "lines").open() as file:
        assert list(pipe(file, map(str.strip))) == ["a", "b"]


# -- from_arrays -------------------------------------------------------------------------------------------------------


def test_rows_of_columns_are_tuples_or_dicts() -> None:
    x, y = np.arange(3), torch.arange(6.0).reshape(3, 2)
    p = pipe(from_arrays(x, y))
    assert len(p) == 3
    assert p[1][0] == 1
    assert p[1][1].tolist() == [2.0, 3.0]
    named = pipe(from_arrays({"x": x, "y": y}))
    assert list(named[2]) == ["x", "y"]
    assert named[2]["y"].tolist() == [4.0, 5.0]
    assert list(pipe(from_arrays(x))) == [(0,), (1,), (2,)]
    assert list(pipe(from_arrays(np.empty((0, 2))))) == []


def test_rows_of_columns_are_not_views_of_what_was_given() -> None:
    x, y = np.zeros((3, 2)), torch.zeros(3, 2)
    for row in pipe(from_arrays(x, y)):
        row[0][:] = 1
        row[1][:] = 1
    assert not x.any()
    assert not y.any()


class Negated(TensorDataset):
    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return tuple(-x[i] for x in self.tensors)


def test_a_tensor_dataset_is_read_by_columns_unless_a_subclass_may_do_otherwise() -> None:
    rows, stages = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3)), (batch(2), collate())
    (x, y), (last_x, last_y) = pipe(from_map(rows), *stages)
    assert (x.tolist(), y.tolist()) == ([[0.0, 1.0], [2.0, 3.0]], [0, 1])
    assert (last_x.tolist(), last_y.tolist(), last_y.dtype) == ([[4.0, 5.0]], [2], torch.int64)
    (x, y), _ = pipe(from_map(Negated(*rows.tensors)), *stages)
    assert (x.tolist(), y.tolist()) == ([[0.0, -1.0], [-2.0, -3.0]], [0, -1])


# -- what pipe makes of its first argument -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ([1, 2], from_map([1, 2])),
        ("ab", from_map("ab")),
        (range(2), from_map(range(2))),
        ({"a": 1}, from_map({"a": 1})),
        (np.arange(2), from_map(np.arange(2))),
        ({1}, from_iterable({1})),
        (from_map([1]), from_map([1])),
        (from_arrays(np.arange(2)), from_arrays(np.arange(2))),
    ],
    ids=repr,
)
def test_a_sequence_becomes_from_map_and_another_iterable_from_iterable(given: Any, source: Source) -> None:
    assert pipe(given).source == source


def test_a_source_of_ones_own_is_a_source() -> None:
    from pipes.context import Context
    from pipes.nodes import Indexed, Node

    class Letters(Source):
        def bind(self, context: Context) -> Node:
            return Indexed(3, lambda positions: ["abc"[p] for p in positions.tolist()], context)

    assert list(pipe(Letters(), batch(2))) == [["a", "b"], ["c"]]
