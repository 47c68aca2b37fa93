"""Bad input is an error that gives rule, value and advice: at construction wherever it can be known there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import pipes
from pipes import (
    Pipeline,
    StageError,
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
    register_collate,
    repeat,
    sample,
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

type Make = Callable[[], object]


def stream() -> from_iterable:
    return from_iterable(lambda: iter(range(3)))


def notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


# -- sizes -------------------------------------------------------------------------------------------------------------

SIZED: list[tuple[Callable[[Any], object], str, int]] = [
    (batch, "size", 1),
    (shuffle_buffer, "size", 1),
    (take, "size", 0),
    (skip, "size", 0),
    (repeat, "times", 1),
    (shard_by_worker, "shards", 1),
    (with_replacement, "size", 1),
    (lambda n: weighted([1, 1, 1], n), "size", 1),
    (lambda n: shard_by_rank(0, n), "world_size", 1),
    (lambda n: shard_by_rank(n, 4), "rank", 0),
    (lambda n: pipe([1]).at_epoch(n), "epoch", 0),
]
IDS = ["batch", "buffer", "take", "skip", "repeat", "shards", "replacement", "weighted", "world", "rank", "epoch"]


@pytest.mark.parametrize(("make", "name", "least"), SIZED, ids=IDS)
def test_a_size_below_the_least_names_rule_and_value(make: Callable[[Any], object], name: str, least: int) -> None:
    for value in (least - 1, np.int64(least - 1), -(2**70)):
        with pytest.raises(ValueError, match=rf"`{name}` must be >= {least}, got {int(value)}"):
            make(value)


@pytest.mark.parametrize("value", [1.0, np.float64(2), True, "2", [2], np.array([1, 2])], ids=repr)
@pytest.mark.parametrize(("make", "name"), [(make, name) for make, name, _ in SIZED], ids=IDS)
def test_a_size_that_is_no_integer_names_rule_and_value(
    make: Callable[[Any], object], name: str, value: object
) -> None:
    if isinstance(value, str) and name in ("rank", "world_size"):
        pytest.skip("as text they are read as torchrun writes them")
    with pytest.raises(TypeError, match=rf"`{name}` must be an integer, got {re.escape(repr(value))}"):
        make(value)


@pytest.mark.parametrize("value", [np.int32(3), np.uint8(3), np.array(3)], ids=repr)
@pytest.mark.parametrize("make", [make for make, _, _ in SIZED], ids=IDS)
def test_numpy_integers_are_sizes(make: Callable[[Any], object], value: object) -> None:
    assert make(value) == make(3)


def test_repeat_says_how_to_be_endless() -> None:
    with pytest.raises(ValueError, match="pass None to repeat endlessly"):
        repeat(0)


# -- wrong kinds of arguments ------------------------------------------------------------------------------------------


class NoLength:
    def __getitem__(self, i: int) -> int:
        return i


class WrongLength:
    def __getitem__(self, i: int) -> int:
        return i

    def __len__(self) -> int:
        return -1  # noqa: PLE0303  # a lie, on purpose


AT_CONSTRUCTION: list[tuple[str, Make, type[Exception], str]] = [
    ("a sample on a stream", lambda: pipe(stream(), sample(shuffled())), TypeError,
     r"sample\(shuffled\(\)\) needs random access and got a stream; use shuffle_buffer\(size\)"),
    ("a sample behind a filter", lambda: pipe([1], filter(bool), sample([0])), TypeError, "use shuffle_buffer"),
    ("a sample behind an opaque callable", lambda: pipe([1], iter, sample([0])), TypeError, "use shuffle_buffer"),
    ("a sample on an endless repeat", lambda: pipe([1], repeat(), sample([0])), TypeError, "use shuffle_buffer"),
    ("an order's class", lambda: sample(shuffled), TypeError, r"got the class shuffled; call it: shuffled\(\)"),
    ("a number as order", lambda: sample(5), TypeError, "`order` must be an order, an iterable of indices .*, got 5"),
    ("an order of floats", lambda: pipe([1, 2], sample([0.0, 1.0])), TypeError, "of integers, got float64"),
    ("an order of strings", lambda: pipe([1, 2], sample(["a"])), TypeError, "of integers"),
    ("an order of bools", lambda: pipe([1, 2], sample(np.array([True, False]))), TypeError, "of integers, got bool"),
    ("a callable order that gives None", lambda: pipe([1], sample(lambda _: None)), TypeError, "indices.*None"),
    ("two shard_by_worker", lambda: pipe([1], shard_by_worker(2), map(str), shard_by_worker(2)), ValueError,
     "at most one shard_by_worker, got 2; remove one"),
    ("shard_by_worker behind pin", lambda: pipe([1], pin(), shard_by_worker(2)), ValueError,
     r"shard_by_worker\(2\) must come before pin\(\).*swap them"),
    ("rank outside the world", lambda: shard_by_rank(2, 2), ValueError,
     "`rank` must be < `world_size`, got rank 2 of 2; ranks count from 0"),
    ("uneven", lambda: shard_by_rank(0, 2, uneven="cut"), ValueError, "`uneven` must be one of .*'drop'.*, got 'cut'"),
    ("negative weight", lambda: weighted([1, -2], 1), ValueError, r"finite and >= 0, got -2.0 at index 1"),
    ("NaN weight", lambda: weighted([float("nan"), 1], 1), ValueError, "finite and >= 0, got nan at index 0"),
    ("infinite weight", lambda: weighted([1, float("inf")], 1), ValueError, "finite and >= 0, got inf at index 1"),
    ("zero weights", lambda: weighted([0.0, 0.0], 1), ValueError, "must not be all zero, got 2 zeros"),
    ("no weights", lambda: weighted([], 1), ValueError, "must not be all zero"),
    ("weights of two dimensions", lambda: weighted([[1.0]], 1), ValueError, r"one-dimensional, got shape \(1, 1\)"),
    ("too few weights", lambda: weighted([1, 0, 2], 3, replacement=False), ValueError,
     "number of non-zero weights without replacement, got 3 > 2"),
    ("weights of another length", lambda: pipe([1, 2], sample(weighted([1], 1))), ValueError,
     "one weight per sample, got 1 for length 2"),
    ("replacement", lambda: weighted([1], 1, replacement=1), TypeError,  # type: ignore[arg-type]
     "`replacement` must be True or False, got 1"),
    ("drop_last", lambda: batch(1, drop_last=1), TypeError, "`drop_last` must be True or False, got 1"),  # type: ignore[arg-type]
    ("index too large", lambda: pipe([1, 2], sample([0, 2])), IndexError, "got index 2 at position 1 for length 2"),
    ("negative index", lambda: pipe([1, 2], sample([-1])), IndexError,
     "got index -1 at position 0 for length 2; count negative indices from the start"),
    ("index of subset", lambda: pipe([1], sample(subset([3]))), IndexError, "got index 3 at position 0 for length 1"),
    ("index of shuffled_subset", lambda: pipe([1], sample(shuffled_subset([3]))), IndexError, "index 3 .* length 1"),
    ("index of a batch of indices", lambda: pipe([1, 2], sample([[0, 1], [7]])), IndexError, "index 7 .* length 2"),
    ("draws from nothing", lambda: pipe([], sample(with_replacement(1))), ValueError, "cannot draw .* length 0"),
    ("subset of a number", lambda: subset(3), TypeError, "`indices` must be"),
    ("columns of unequal length", lambda: from_arrays(np.zeros(2), np.zeros(3)), ValueError,
     r"columns must have equal lengths, got \{0: 2, 1: 3\}"),
    ("named columns of unequal length", lambda: from_arrays({"x": np.zeros(2), "y": torch.zeros(3)}), ValueError,
     r"got \{'x': 2, 'y': 3\}"),
    ("no columns", from_arrays, ValueError, "at least one array"),
    ("a list as column", lambda: from_arrays([1, 2]), TypeError, r"column 0 must be an array .*, got \[1, 2\]"),
    ("a scalar as column", lambda: from_arrays({"x": np.float64(1)}), TypeError, "column 'x' must be an array"),
    ("a memoryview as column", lambda: from_arrays(memoryview(b"abc")), TypeError, "column 0 must be an array"),
    ("a stage as first argument", lambda: pipe(batch(2), [1]), TypeError,
     r"first argument of pipe must be a source, got batch\(2\); put from_map"),
    ("a stage's class as first argument", lambda: pipe(batch, [1]), TypeError, "must be a source, got .*batch"),
    ("a source's class as first argument", lambda: pipe(from_map, map(str)), TypeError, "must be a source"),
    ("a number as first argument", lambda: pipe(3), TypeError, "must be a source, got 3 of type int"),
    ("None as first argument", lambda: pipe(None), TypeError, "must be a source, got None"),
    ("a function as first argument", lambda: pipe(lambda: iter([1])), TypeError, r"wrap it: from_iterable\(...\)"),
    ("a stage in from_map", lambda: from_map(batch(2)), TypeError, r"`dataset` must .*, got .*batch\(2\)"),
    ("a stage in from_iterable", lambda: from_iterable(batch(2)), TypeError, r"`iterable` must be .*, got batch\(2\)"),
    ("a stage in concat", lambda: concat([1], batch(2)), TypeError, r"must be a source, got batch\(2\)"),
    ("a stage in zip", lambda: zip(batch(2)), TypeError, r"must be a source, got batch\(2\)"),
    ("a dataset's class", lambda: from_map(list), TypeError, "`dataset` must have __getitem__ and __len__, got .*list"),
    ("an iterable's class", lambda: from_iterable(list), TypeError, "`iterable` must be an iterable"),
    ("a stream in from_map", lambda: from_map(iter([1])), TypeError, "use from_iterable for a stream"),
    ("a dataset without length", lambda: from_map(NoLength()), TypeError, "must have __getitem__ and __len__"),
    ("a dataset of negative length", lambda: pipe(from_map(WrongLength())), ValueError, "__len__"),
    ("a number in from_iterable", lambda: from_iterable(3), TypeError, "must be an iterable or a function.*, got 3"),
    ("a stage's class as stage", lambda: pipe([1], batch), TypeError, r"got the class batch; write batch\(...\)"),
    ("a stage's class in Pipeline", lambda: Pipeline(from_map([1]), (batch,)), TypeError, "the class batch; write"),  # type: ignore[arg-type]
    ("a list as stage", lambda: pipe([1], [2]), TypeError, r"must be callable from iterable to iterator, got \[2\]"),
    ("a source as stage", lambda: pipe([1], from_map([2])), TypeError, "a stage must be callable"),
    ("no function for map", lambda: map(3), TypeError, "`fn` must be callable, got 3 of type int"),  # type: ignore[arg-type]
    ("no function for filter", lambda: filter(None), TypeError, "`fn` must be callable, got None"),  # type: ignore[arg-type]
    ("no function for flat_map", lambda: flat_map("x"), TypeError, "`fn` must be callable, got 'x'"),  # type: ignore[arg-type]
    ("no function for collate", lambda: collate(3), TypeError, "`fn` must be callable, got 3"),  # type: ignore[arg-type]
    ("another target of collate", lambda: collate(to="jax"), ValueError, "`to` must be one of .*, got 'jax'"),
    ("registering no class", lambda: register_collate("x", len), TypeError, "`cls` must be a class, got 'x'"),  # type: ignore[arg-type]
    ("registering no function", lambda: register_collate(NoLength, 3), TypeError, "`fn` must be callable"),  # type: ignore[arg-type]
    ("a start that is no integer", lambda: enumerate(0.5), TypeError, "`start` must be an integer, got 0.5"),  # type: ignore[arg-type]
    ("a strict zip of unequal lengths", lambda: zip([1], [1, 2]), ValueError, r"equal lengths, got \[1, 2\]"),
    ("strict", lambda: zip([1], strict=1), TypeError, "`strict` must be True or False, got 1"),  # type: ignore[arg-type]
    ("a seeded part", lambda: concat(pipe([1]).seeded(3)), ValueError, "its own seed or epoch, got part 0"),
    ("a sharded part", lambda: zip(pipe([1], shard_by_worker(2))), ValueError, "must not have shard_by_worker"),
    ("an endless repeat of nothing", lambda: pipe([], repeat()), ValueError, "length 0 endlessly; check the source"),
    ("a repeated one-shot", lambda: pipe(iter([1]), repeat(2)), ValueError, "more than once.*pass from_iterable"),
    ("a sharded one-shot", lambda: pipe(iter([1]), shard_by_worker(2)), ValueError, "more than once.*pass from_iter"),
    ("a repeated one-shot part", lambda: pipe(concat([1], iter([1])), repeat(2)), ValueError, "more than once"),
    ("a repeated one-shot order", lambda: pipe([1], sample(iter([0])), repeat(2)), ValueError, "more than once"),
    ("a seed", lambda: pipe([1]).seeded(1.5), TypeError, "`seed` must be an integer, got 1.5"),  # type: ignore[arg-type]
    ("a step", lambda: pipe([1])[::2], ValueError, "step of a slice must be 1, got 2"),
    ("an index", lambda: pipe([1])["a"], TypeError, "index|integer"),
    ("an index out of range", lambda: pipe([1])[1], IndexError, "index 1 is out of range for length 1"),
    ("a negative index out of range", lambda: pipe([1])[-2], IndexError, "index -2 is out of range for length 1"),
    ("an index into a stream", lambda: pipe(stream())[0], TypeError, "stream without random access"),
    ("a negative index into a stream", lambda: pipe(stream())[-1], TypeError, "length|random access"),
    ("the length of a stream", lambda: len(pipe(stream())), TypeError, "length .* is unknown"),
    ("the length of an endless one", lambda: len(pipe([1], repeat())), TypeError, r"endless .* put take\(size\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "kind", "words"), [c[1:] for c in AT_CONSTRUCTION], ids=[c[0] for c in AT_CONSTRUCTION]
)
def test_bad_input_is_an_error_at_construction(make: Make, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        make()


@pytest.mark.parametrize(("rank", "world"), [("x", "2"), ("0", "two"), ("2", "2"), ("-1", "2")])
def test_a_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch, rank: str, world: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ValueError, match=r"(?i)rank|world_size"):
        shard_by_rank()


def test_rank_and_world_size_come_from_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert shard_by_rank() == shard_by_rank(1, 3)


def test_every_public_stage_is_refused_as_a_class() -> None:
    classes = [c for n in pipes.__all__ if isinstance(c := getattr(pipes, n), type) and issubclass(c, pipes.Stage)]
    assert len(classes) > 12
    for cls in classes:
        with pytest.raises(TypeError, match="got the class"):
            pipe([1], cls)


# -- what shows only in a run ------------------------------------------------------------------------------------------


def stop(_: Any) -> Any:
    raise StopIteration


def lookup(_: Any) -> Any:
    return [0][1:][0]


def at_two(fault: Callable[[Any], Any]) -> Callable[[int], Any]:
    def maybe(x: int) -> Any:
        return fault(x) if x == 2 else x

    return maybe


def listed_at_two(fault: Callable[[Any], Any]) -> Callable[[int], Any]:
    def maybe(x: int) -> Any:
        return fault(x) if x == 2 else [x]

    return maybe


def with_rng_at_two(fault: Callable[[Any], Any]) -> Callable[..., Any]:
    def maybe(x: int, rng: np.random.Generator) -> Any:  # noqa: ARG001  # what takes `rng` runs on another path
        return fault(x) if x == 2 else x

    return maybe


def run_until_error(p: Any) -> tuple[list[Any], Exception]:
    got: list[Any] = []
    try:
        got.extend(p)  # keeps what came before
    except Exception as error:
        return got, error
    pytest.fail(f"no error came, only {got}")


SOURCES: list[Any] = [range(5), from_iterable(range(5)), concat(pipe(from_iterable([0, 1])), [2, 3])]


@pytest.mark.parametrize("source", SOURCES, ids=["random access", "stream", "joined"])
@pytest.mark.parametrize(
    ("stage", "before"),
    [
        (lambda fault: map(at_two(fault)), [0, 1]),
        (lambda fault: map(with_rng_at_two(fault)), [0, 1]),
        (lambda fault: filter(at_two(fault)), [1]),
        (lambda fault: flat_map(listed_at_two(fault)), [0, 1]),
    ],
    ids=["map", "map with rng", "filter", "flat_map"],
)
@pytest.mark.parametrize(("fault", "kind"), [(stop, StageError), (lookup, IndexError)], ids=["StopIteration", "Index"])
def test_a_fault_of_a_function_names_stage_and_position_and_never_shortens_the_epoch(
    source: Any, stage: Callable[[Any], Any], before: list[int], fault: Callable[[Any], Any], kind: type[Exception]
) -> None:
    made = stage(fault)
    got, error = run_until_error(pipe(source, made))
    assert got == before
    assert type(error) is kind
    assert "position 2" in notes(error)
    assert type(made).__name__ + "(" in notes(error)


@pytest.mark.parametrize("stage", [map(at_two(stop)), filter(at_two(stop)), flat_map(listed_at_two(stop))], ids=repr)
def test_a_stage_alone_makes_an_error_of_stop_iteration(stage: pipes.Stage) -> None:
    _, error = run_until_error(stage(range(5)))
    assert type(error) is StageError
    assert "position 2" in notes(error)
    assert "filter" in str(error)


@pytest.mark.parametrize("inner", [map(at_two(stop)), map(with_rng_at_two(stop))], ids=repr)
def test_the_position_is_the_stages_own_input_position_inside_a_batch(inner: pipes.Stage) -> None:
    got, error = run_until_error(pipe(range(6), sample([5, 4, 3, 2, 1, 0]), inner, batch(2)))
    assert got == [[5, 4]]
    assert "position 3" in notes(error)


def test_stop_iteration_out_of_collates_function_is_an_error() -> None:
    _, error = run_until_error(pipe(range(6), batch(2), collate(stop)))
    assert type(error) is StageError
    assert "collate(" in notes(error)


def test_a_flat_map_that_gives_no_iterable_is_an_error_with_stage_and_position() -> None:
    got, error = run_until_error(pipe(range(5), flat_map(at_two(lambda _: None)), take(3)))
    assert got == []
    assert type(error) is TypeError
    assert "position 0" in notes(error)
    _, error = run_until_error(pipe([[1], 2], unbatch()))
    assert "unbatch() " in notes(error) or "unbatch()," in notes(error)
    assert "position 1" in notes(error)


class Dataset:
    def __init__(self, fault: Callable[[Any], Any], said: int = 5) -> None:
        self.fault, self.said = fault, said

    def __getitem__(self, i: int) -> Any:
        return self.fault(i) if i == 2 else i

    def __len__(self) -> int:
        return self.said


@pytest.mark.parametrize(("fault", "kind"), [(stop, StageError), (lookup, IndexError), ({}.__getitem__, KeyError)])
@pytest.mark.parametrize("stages", [[], [batch(2)], [filter(lambda _: True)], [batch(4)]], ids=repr)
def test_a_fault_of_a_dataset_is_an_error_with_the_position(
    fault: Callable[[Any], Any], kind: type[Exception], stages: Sequence[Any]
) -> None:
    got, error = run_until_error(pipe(from_map(Dataset(fault)), *stages))
    assert type(error) is kind
    assert "position 2" in notes(error)
    assert "from_map(" in notes(error)
    assert len(got) == (1 if stages == [batch(2)] else 0 if stages == [batch(4)] else 2)


@pytest.mark.parametrize("stages", [[], [batch(2)], [sample(shuffled())], [filter(bool)]], ids=repr)
def test_a_dataset_whose_length_lies_is_named(stages: Sequence[Any]) -> None:
    class Lying(list[int]):
        def __len__(self) -> int:
            return 5

    _, error = run_until_error(pipe(from_map(Lying([7, 8, 9])), *stages))
    assert type(error) is IndexError
    assert "does its __len__ lie?" in notes(error)
    assert "said to be 5" in notes(error)
    assert re.search(r"position \d", notes(error))


class Bulk:
    def __init__(self, answer: Callable[[list[int]], Any]) -> None:
        self.answer = answer

    def __getitem__(self, i: int) -> int:
        return i

    def __getitems__(self, keys: list[int]) -> Any:
        return self.answer(keys)

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("answer", [lambda keys: keys[1:], lambda keys: [*keys, 0], lambda _: []])
def test_a_wrong_count_of_bulk_access_is_an_error(answer: Callable[[list[int]], Any]) -> None:
    _, error = run_until_error(pipe(from_map(Bulk(answer)), batch(3)))
    assert type(error) is StageError
    assert re.search(r"one sample per key, got \d for 3 keys", str(error))


@pytest.mark.parametrize(("fault", "kind"), [(stop, StageError), (lookup, IndexError)])
def test_a_fault_of_bulk_access_names_the_source_and_the_keys(
    fault: Callable[[Any], Any], kind: type[Exception]
) -> None:
    got, error = run_until_error(pipe(from_map(Bulk(lambda keys: fault(keys) if 4 in keys else keys)), batch(3)))
    assert got == [[0, 1, 2]]
    assert type(error) is kind
    assert "[3, 4, 5]" in notes(error)


@pytest.mark.parametrize("source", [lambda: iter([1, 2]), lambda: from_iterable(iter([1, 2]))])
def test_a_second_run_of_a_one_shot_iterator_is_an_error(source: Callable[[], Any]) -> None:
    p = pipe(source(), map(str))
    assert list(p) == ["1", "2"]
    for _ in range(2):
        with pytest.raises(StageError, match=r"one-shot iterator and was run already.*from_iterable\(lambda"):
            list(p)


def test_a_second_run_after_an_abandoned_one_is_an_error_too() -> None:
    p = pipe(iter([1, 2]))
    next(iter(p))
    with pytest.raises(StageError, match="one-shot"):
        list(p)


def test_a_factory_that_makes_no_iterable_is_named() -> None:
    with pytest.raises(TypeError, match="must make an iterable, got 3"):
        list(pipe(from_iterable(lambda: 3)))


def test_a_fault_of_a_stream_is_noted_after_what_came_before() -> None:
    def broken() -> Iterator[int]:
        yield 0
        yield 1
        raise OSError("disk")

    got, error = run_until_error(pipe(from_iterable(broken), map(abs), batch(1)))
    assert got == [[0], [1]]
    assert type(error) is OSError
    assert "from_iterable(" in notes(error)
    assert "2" in notes(error)


def test_an_opaque_callable_that_returns_no_iterator_is_named() -> None:
    with pytest.raises(TypeError, match=r"must return an iterator.*is it a function of one element"):
        list(pipe([1], lambda _: 3))


def test_indices_of_a_stream_of_indices_are_checked_when_they_come() -> None:
    p = pipe("abc", sample(lambda _: itertools.chain([2], [5])))
    got, error = run_until_error(p)
    assert got == ["c"]
    assert type(error) is IndexError
    assert "index 5" in str(error)
    assert "length 3" in str(error)


def test_a_strict_zip_of_streams_of_unequal_lengths_names_both_parts() -> None:
    got, error = run_until_error(zip(from_iterable([1, 2]), from_iterable([1])))
    assert got == [(1, 1)]
    assert type(error) is ValueError
    assert "part 1 ended after 1 elements and part 0 did not; pass strict=False" in str(error)


def test_an_endless_repeat_of_an_empty_stream_is_an_error_and_no_hang() -> None:
    with pytest.raises(ValueError, match="endless repeat is empty"):
        list(pipe(from_iterable(lambda: []), repeat()))
