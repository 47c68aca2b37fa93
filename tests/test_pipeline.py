"""A pipeline is a value: it prints as its code, compares, hashes, pickles, and is a sequence where it can be."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import toolz
import torch

import pipes
from pipes import (
    Pipeline,
    batch,
    collate,
    concat,
    enumerate,
    filter,
    flat_map,
    from_arrays,
    from_iterable,
    from_map,
    map,
    pin,
    pipe,
    repeat,
    sample,
    sequential,
    shard_by_rank,
    shard_by_worker,
    shuffle_buffer,
    shuffled,
    shuffled_subset,
    skip,
    subset,
    take,
    unbatch,
    weighted,
    with_replacement,
    zip,
)


def pairs(pulls: Iterable[Any]) -> Iterator[Any]:
    """An opaque stage."""
    return itertools.pairwise(pulls)


def shifted(pulls: Iterable[int], rng: np.random.Generator) -> Iterator[int]:
    by = int(rng.integers(2**40))
    return (x + by for x in pulls)


NAMESPACE: dict[str, Any] = {
    **{name: getattr(pipes, name) for name in pipes.__all__},
    "partial": functools.partial,
    "pairs": pairs,
    "nan": math.nan,
    "np": np,
}

PRINTED: list[Pipeline] = [
    pipe([1, 2]),
    pipe([]),
    pipe("text", map(str)),
    pipe(range(3, 9, 2)),
    pipe({"a": 1, None: [2.5, b"x"]}),
    pipe(from_map({"a": 1}, keys=["a"])),
    pipe(from_iterable([1]), take(1)),
    pipe([math.nan, -0.0, 1j, True]),
    pipe(range(9), filter(bool), flat_map(list), unbatch()),
    pipe(range(9), map(functools.partial(pow, 2, mod=7))),
    pipe(range(9), batch(2), batch(3, drop_last=True), collate(), collate(to="numpy"), collate(len), pin()),
    pipe(range(9), sample(shuffled()), sample(sequential()), sample(with_replacement(9)), sample([0, 3])),
    pipe(range(9), sample([[0, 1], [2]]), shuffle_buffer(2), take(2), skip(1), enumerate(), enumerate(5)),
    pipe(range(9), repeat(2), repeat(), shard_by_rank(1, 3, uneven="pad"), shard_by_worker(2), batch(2)),
    pipe(range(9), map(str)).seeded(-3).at_epoch(4),
    pipe(range(9)).seeded(2),
    pipe(range(9), pairs, take(2)),
    concat(),
    concat([1], "ab", pipe(range(2), map(str))),
    zip([1], [2]),
    zip([1], "ab", strict=False).at_epoch(2),
    pipe(concat([1], zip([2], [3])), map(str), batch(2)).seeded(1),
    pipe(range(100), *[map(str) for _ in range(12)]),
]


@pytest.mark.parametrize("p", PRINTED, ids=range(len(PRINTED)))
def test_a_repr_is_the_code_that_makes_the_pipeline(p: Pipeline) -> None:
    again = eval(repr(p), NAMESPACE)
    assert again == p
    assert hash(again) == hash(p)
    assert repr(again) == repr(p)


@pytest.mark.parametrize(
    "p",
    [
        pipe(range(9), sample(subset([3, 1]))),
        pipe(range(9), sample(shuffled_subset([3, 1]))),
        pipe(range(2), sample(weighted([0.5, 1.5], 3))),
        pipe("ab", map(str.upper)),
    ],
    ids=repr,
)
def test_a_repr_of_short_arrays_and_methods_of_classes_is_code_too(p: Pipeline) -> None:
    assert eval(repr(p), NAMESPACE) == p


@pytest.mark.parametrize(
    "p",
    [
        pipe(np.arange(10**6), map(lambda x: x)),
        pipe(from_arrays(torch.zeros(1000, 1000), np.zeros((1000, 5)))),
        pipe(list(range(10**5)), map(lambda x: x), batch(2)),
        pipe(from_iterable(x for x in "abc")),
        pipe(from_iterable(lambda: iter("abc")), map(functools.partial(lambda x, y: (x, y), y=2))),
        pipe(from_map({i: object() for i in range(1000)})),
    ],
    ids=range(6),
)
def test_a_repr_of_what_is_no_code_is_short_and_has_no_address(p: Pipeline) -> None:
    assert len(repr(p)) < 200
    assert " at 0x" not in repr(p)


def make(seed: int = 0) -> list[Pipeline]:
    return [
        pipe(np.arange(4), map(str)).seeded(seed),
        pipe(np.array([1.0, math.nan])).seeded(seed),
        pipe([math.nan, [np.zeros(2)]], map(repr)).seeded(seed),
        pipe(from_arrays({"x": torch.zeros(2), "y": np.zeros(2)}), batch(2), collate()).seeded(seed),
        pipe(torch.tensor([1.0, math.nan])).seeded(seed),
        pipe(range(4), sample(weighted([1.0, 2, 3, 4], 2))).seeded(seed),
        pipe(range(4), map(functools.partial(operator.add, 1))).seeded(seed),
        concat(np.arange(2), [1], from_iterable([2])).seeded(seed),
        pipe(from_map(range(4), keys=np.array([1, 2])), pairs).seeded(seed),
    ]


@pytest.mark.parametrize(("a", "b"), [*itertools.zip_longest(make(), make())])
def test_pipelines_made_alike_are_equal_with_equal_hashes(a: Pipeline, b: Pipeline) -> None:
    assert (a == b) is True
    assert (a != b) is False
    assert hash(a) == hash(b)
    assert a != b.seeded(1)
    assert a != b.at_epoch(1)
    assert a != pipe(b, take(1))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (pipe([1]), pipe([True])),
        (pipe([1]), pipe((1,))),
        (pipe(np.arange(2)), pipe(np.arange(2.0))),
        (pipe(np.zeros(2)), pipe(np.zeros((2, 1)))),
        (pipe([1], map(lambda x: x)), pipe([1], map(lambda x: x))),
        (pipe([1], map(str)), pipe([1], filter(str))),
        (pipe([1], enumerate(1)), pipe([1], enumerate(2))),
        (pipe({"a": 1, "b": 2}), pipe({"b": 2, "a": 1})),
        (concat([1]), zip([1])),
        (pipe(range(3), sample([0, 1])), pipe(range(3), sample([1, 0]))),
    ],
    ids=range(10),
)
def test_pipelines_that_differ_are_not_equal(a: Pipeline, b: Pipeline) -> None:
    assert (a == b) is False
    assert a != "something else"


def test_a_pipeline_of_a_function_is_equal_to_itself_and_can_be_a_key() -> None:
    def fn(x: Any) -> Any:
        return x

    assert pipe([1], map(fn)) == pipe([1], map(fn))
    assert {pipe([1], map(fn)): "x"}[pipe([1], map(fn))] == "x"
    assert len({*PRINTED, *PRINTED}) == len(PRINTED)


class Unequal:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparing")

    __hash__ = None  # type: ignore[assignment]


def test_elements_whose_own_equality_raises_make_pipelines_that_differ() -> None:
    thing = Unequal()
    assert pipe([thing]) == pipe([thing])
    assert pipe([thing]) != pipe([Unequal()])
    assert isinstance(hash(pipe([thing])), int)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("index", range(len(PRINTED)))
def test_a_pipeline_survives_pickling_equal_also_after_use(index: int, used: bool) -> None:
    p = copy.copy(PRINTED[index])
    if used:
        _ = p.length, bool(p), hash(p), p.explain()
    for module in (pickle, cloudpickle):
        again = pickle.loads(module.dumps(p))
        assert again == p
        assert again.length == p.length


@pytest.mark.parametrize("p", make(), ids=range(9))
def test_arrays_survive_pickling_equal(p: Pipeline) -> None:
    again = pickle.loads(cloudpickle.dumps(p))
    assert again == p
    assert repr(list(again)) == repr(list(p))


def test_lambdas_travel_by_cloudpickle_and_give_the_same_elements() -> None:
    p = pipe(range(5), map(lambda x, rng: x + int(rng.integers(100))), filter(lambda x: x % 2), batch(2)).seeded(3)
    assert list(pickle.loads(cloudpickle.dumps(p))) == list(p)


def test_a_used_pipeline_does_not_pickle_its_memory_of_use() -> None:
    p = pipe(range(10), sample(shuffled()), map(str))
    before = len(cloudpickle.dumps(p))
    assert (len(p), p[0]) == (10, next(iter(p)))
    assert len(cloudpickle.dumps(p)) == before


def test_a_pickled_one_shot_iterator_still_runs_only_once() -> None:
    p = pickle.loads(pickle.dumps(pipe(iter([1, 2]))))
    assert list(p) == [1, 2]
    with pytest.raises(pipes.StageError, match="one-shot"):
        list(p)


# -- as a sequence -----------------------------------------------------------------------------------------------------

SEQUENCES: list[Pipeline] = [
    pipe(range(7)),
    pipe(range(7), sample(shuffled()), map(str)),
    pipe(range(7), batch(2)),
    pipe(range(7), shuffle_buffer(3), enumerate()),
    concat([1, 2], [3, 4, 5]),
    pipe(zip([1, 2, 3], "abc"), repeat(2)),
]
BOUNDS = [None, 0, 1, 2, 5, 100, -1, -2, -100]


@pytest.mark.parametrize("p", SEQUENCES, ids=range(6))
def test_slices_are_pipelines_of_the_elements_that_a_list_gives(p: Pipeline) -> None:
    elements = list(p)
    for start, stop in itertools.product(BOUNDS, BOUNDS):
        part = p[start:stop]
        assert isinstance(part, Pipeline)
        assert list(part) == elements[start:stop]
        assert len(part) == len(elements[start:stop])


@pytest.mark.parametrize("p", SEQUENCES, ids=range(6))
def test_indices_count_from_either_end(p: Pipeline) -> None:
    elements = list(p)
    for i in range(-len(p), len(p)):
        assert p[i] == elements[i] == p[np.int64(i)]
    for i in (len(p), -len(p) - 1):
        with pytest.raises(IndexError, match=f"index {i} is out of range for length {len(p)}"):
            p[i]


def test_slices_of_streams_and_endless_pipelines_are_taken_from_the_front() -> None:
    assert list(pipe(from_iterable(range(9)))[2:5]) == [2, 3, 4]
    assert list(pipe([1, 2], repeat())[3:6]) == [2, 1, 2]
    assert pipe([1, 2], repeat())[10**6 + 1] == 2
    with pytest.raises(TypeError, match="length"):
        pipe(from_iterable(range(9)))[-2:]


def test_a_slice_of_a_sharded_pipeline_is_what_a_list_gives_or_an_error() -> None:
    p = pipe(range(10), shard_by_worker(2), map(abs))
    try:
        part = list(p[1:4])
    except (TypeError, ValueError):
        return
    assert part == list(p)[1:4]


def test_lengths_that_are_unknown_or_endless_are_type_errors_and_list_works() -> None:
    for p in (pipe(range(9), filter(bool)), pipe(range(9), pairs), pipe(from_iterable([1]))):
        assert p.length is None
        with pytest.raises(TypeError, match="is unknown"):
            len(p)
        assert list(p) is not None
    assert pipe([1], repeat()).length == math.inf
    with pytest.raises(TypeError, match="endless"):
        len(pipe([1], repeat()))


def test_every_pipeline_is_true() -> None:
    assert all([pipe([]), pipe(range(9), filter(bool)), pipe([1], repeat()), concat()])


def test_a_pipeline_is_immutable_and_extending_makes_another() -> None:
    p = pipe([1, 2], map(str))
    q = pipe(p, batch(2))
    assert p == pipe([1, 2], map(str))
    assert q == pipe([1, 2], map(str), batch(2))
    with pytest.raises(AttributeError):
        p.seed = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        p.stages[0].fn = len  # type: ignore[attr-defined]


def test_seed_and_epoch_are_kept_when_a_pipeline_is_extended() -> None:
    p = pipe(range(9), sample(shuffled())).seeded(2).at_epoch(3)
    assert list(pipe(p, map(abs))) == list(p)
    assert list(p[2:]) == list(p)[2:]
    assert p.seeded(5).seeded(2) == p == p.at_epoch(np.int64(3)).seeded(np.int8(2))  # type: ignore[arg-type]
    assert Pipeline(p.source, p.stages, seed=np.int64(2), epoch=np.int64(3)) == p  # type: ignore[arg-type]


# -- explain -----------------------------------------------------------------------------------------------------------


def test_explain_is_a_table_of_every_stage() -> None:
    p = pipe(from_iterable(range(9)), take(4), map(str), batch(2), filter(len), shuffle_buffer(3), pin())
    rows = [line.split("  ") for line in p.explain().splitlines()]
    table = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert table[0] == ["stage", "length", "access", "holds", "runs in"]
    assert [row[0] for row in table[1:]] == [repr(s) for s in (p.source, *p.stages)]
    assert all(len(row) == 5 for row in table)
    assert {row[2] for row in table[1:]} == {"stream"}
    assert table[-1][4] == "consumer"
    assert table[-2][3] == "3 elements"


def test_explain_shows_endless_lengths_random_access_and_shards() -> None:
    text = pipe(range(9), repeat(), shard_by_worker(2), batch(2), pin()).explain()
    assert "endless" in text
    assert "random" in text
    assert "shards, in workers" in text
    assert text.splitlines()[-1].endswith("consumer")
    assert concat([1], [2]).explain().count("\n") == 1


# -- joining -----------------------------------------------------------------------------------------------------------


def test_concat_of_the_parts_is_the_whole() -> None:
    p = pipe(range(7), map(str))
    assert list(concat(p[:3], p[3:])) == list(p)
    assert list(concat()) == []
    assert list(concat([], [1], [], [2, 3])) == [1, 2, 3]
    assert list(concat(from_iterable([1]), [2])) == [1, 2]
    assert concat([1, 2], [3])[-1] == 3
    assert list(pipe(concat([1], [2]), repeat(2))) == [1, 2, 1, 2]


def test_zip_agrees_with_the_builtin_in_every_mixture() -> None:
    for a, b in itertools.product([range(3), from_iterable(range(3))], repeat=2):
        assert list(zip(a, b)) == [(0, 0), (1, 1), (2, 2)]
        assert list(zip(a, pipe(b, take(2)), strict=False)) == [(0, 0), (1, 1)]
    assert list(zip()) == []
    assert len(zip([1, 2], pipe([3], repeat()), strict=False)) == 2
    assert zip([1, 2], "ab")[1] == (2, "b")


def test_equal_parts_draw_differently() -> None:
    part = pipe(range(50), sample(shuffled()))
    whole = list(concat(part, part))
    assert whole[:50] != whole[50:]
    assert any(a != b for a, b in zip(part, part))  # this is the zip of pipelines


# -- stages outside a pipeline -----------------------------------------------------------------------------------------

STAGES: list[Any] = [
    map(str),
    map(lambda x, rng: x + int(rng.integers(1000))),
    filter(lambda x: x % 3),
    flat_map(lambda x: [x, x]),
    enumerate(2),
    sample(shuffled()),
    shuffle_buffer(4),
    take(3),
    skip(3),
    repeat(2),
    batch(4),
    shard_by_rank(1, 2),
    shard_by_worker(2),
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: type(s).__name__)
def test_a_stage_alone_gives_what_it_gives_in_a_pipeline(stage: Any) -> None:
    assert list(stage(range(10))) == list(pipe(range(10), stage))
    assert list(stage(list(range(10)))) == list(pipe(range(10), stage))
    if not isinstance(stage, (sample, repeat)):
        assert list(stage(iter(range(10)))) == list(pipe(from_iterable(range(10)), stage))


def test_stages_work_in_toolz() -> None:
    assert toolz.pipe(range(5), map(str), batch(2), list) == [["0", "1"], ["2", "3"], ["4"]]
    together = toolz.compose(list, take(2), batch(2), filter(lambda x: x != 1))
    assert together(range(9)) == [[0, 2], [3, 4]]
    assert list(toolz.compose_left(enumerate(), shuffle_buffer(1))("ab")) == [(0, "a"), (1, "b")]
    assert list(pipe(range(5), toolz.compose(batch(2), map(str)))) == [["0", "1"], ["2", "3"], ["4"]]


def test_any_callable_from_iterable_to_iterator_is_a_stage() -> None:
    assert list(pipe(range(4), pairs)) == [(0, 1), (1, 2), (2, 3)]
    assert list(pipe(range(4), functools.partial(toolz.sliding_window, 3), map(sum))) == [3, 6]
    assert list(pipe(range(4), reversed_list, batch(2))) == [[3, 2], [1, 0]]
    assert list(pipe(range(3), lambda xs: (x for x in xs if x))) == [1, 2]


def reversed_list(pulls: Iterable[Any]) -> list[Any]:
    return list(pulls)[::-1]


def test_an_opaque_callable_with_rng_follows_seed_and_epoch() -> None:
    p = pipe(range(3), shifted)
    assert list(p) == list(p)
    assert len({tuple(p.seeded(s).at_epoch(e)) for s in range(3) for e in range(3)}) == 9


def test_an_opaque_callable_is_lazy() -> None:
    drawn: list[int] = []
    p = pipe(from_iterable(drawn.append(i) or i for i in range(9)), lambda xs: (x for x in xs))  # type: ignore[func-returns-value]
    run = iter(p)
    assert drawn == []
    next(run)
    assert drawn == [0]
