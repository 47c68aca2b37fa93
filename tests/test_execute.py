"""`execute` gives what iterating gives: laws 2 and 11 over generated pipelines, and what a loader promises besides."""

from __future__ import annotations

import builtins
import itertools
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import run_script
from strategies import pipelines
from tasks import (
    KINDS,
    CustomError,
    Describes,
    FailsAt,
    Faulty,
    Gate,
    Local,
    Lock,
    Locked,
    Reads,
    ReadsAll,
    big,
    doubled,
    drawn_globally,
    initialised,
    jittered,
    lock_at_three,
    meta_at_three,
    nested,
    nested_by_default,
    number_given,
    pid_of,
    refusing,
    repr_of,
    told,
    with_pid,
)

import pipes as p
from pipes import WorkerError, execute, pipe
from pipes.values import same

PROCESSES = ("fork", "forkserver", "spawn")
WAYS: list[dict[str, Any]] = [
    {"backend": "process", "start_method": "fork"},
    {"backend": "process", "start_method": "forkserver"},
    {"backend": "process", "start_method": "spawn"},
    {"backend": "thread"},
    {"backend": "serial"},
]
CHEAP: list[dict[str, Any]] = [WAYS[0], WAYS[3], WAYS[4]]


def name_of(way: Any) -> str:
    return str(way.get("start_method", way.get("backend"))) if isinstance(way, dict) else str(way)


every_way = pytest.mark.parametrize("way", WAYS, ids=name_of)
every_process = pytest.mark.parametrize("method", PROCESSES)


@st.composite
def ways(draw: Any, *, threads: bool = False) -> dict[str, Any]:
    """Draw how to run a pipeline: mostly by fork, which is cheap, and spawned workers seldom and few."""
    kind = draw(st.sampled_from(["thread"] if threads else ["fork"] * 9 + ["forkserver"] * 3 + ["spawn", "serial"]))
    most = {"spawn": (1,), "forkserver": (0, 1, 2, 3)}.get(kind, (0, 1, 2, 3, 5))
    way: dict[str, Any] = {"workers": draw(st.sampled_from(most)), "prefetch": draw(st.sampled_from([1, 2, 4]))}
    return way | ({"start_method": kind} if kind in PROCESSES else {"backend": kind})


# Law 2 ----------------------------------------------------------------------------------------------------------------


def check_transparency(pipeline: p.Pipeline, way: dict[str, Any], epochs: int) -> None:
    with execute(pipeline, **way) as loader:
        for epoch in range(pipeline.epoch, pipeline.epoch + epochs):
            expected, got = list(pipeline.at_epoch(epoch)), list(loader)
            assert same(got, expected), f"epoch {epoch}: {got}, not {expected}"


@settings(max_examples=settings().max_examples * 2)
@given(pipelines(), ways(), st.integers(1, 3))
def test_workers_change_nothing(pipeline: p.Pipeline, way: dict[str, Any], epochs: int) -> None:
    check_transparency(pipeline, way, epochs)


@settings(max_examples=10)
@given(pipelines(size=120, stages_at_most=3), ways(), st.integers(1, 3))
def test_workers_change_nothing_where_there_is_more_to_do(
    pipeline: p.Pipeline, way: dict[str, Any], epochs: int
) -> None:
    check_transparency(pipeline, way, epochs)


def pipelines_that_draw_by_rng_only() -> st.SearchStrategy[p.Pipeline]:
    """Draw pipelines that threads can run: they share the global generators."""
    from pipes.testing.strategies import Counting, chained, doubled, most, tagged

    size = st.integers(1, 5)
    stage: st.SearchStrategy[Any] = st.one_of(
        st.sampled_from([p.map(tagged), p.map(jittered), p.filter(most), p.flat_map(doubled), chained]),
        size.map(p.batch),
        size.map(p.shuffle_buffer),
        st.integers(1, 3).map(p.repeat),
        st.integers(0, 9).map(p.take),
        st.integers(1, 4).map(p.shard_by_worker),
    )
    source = st.sampled_from([p.from_map(range(23)), p.from_iterable(Counting(23)), p.from_arrays(np.arange(23))])
    return st.builds(assembled, source, st.lists(stage, max_size=5), st.integers(0, 3))


def assembled(source: p.Source, stages: list[Any], seed: int) -> p.Pipeline:
    """Leave out shards after the first."""
    first = next((i for i, s in enumerate(stages) if isinstance(s, p.shard_by_worker)), len(stages))
    kept = [s for i, s in enumerate(stages) if i <= first or not isinstance(s, p.shard_by_worker)]
    return pipe(source, *kept).seeded(seed)


@given(pipelines_that_draw_by_rng_only(), ways(threads=True), st.integers(1, 3))
def test_threads_change_nothing(pipeline: p.Pipeline, way: dict[str, Any], epochs: int) -> None:
    check_transparency(pipeline, way, epochs)


@given(pipelines(), ways())
def test_without_order_the_outputs_are_the_same_in_some_order(pipeline: p.Pipeline, way: dict[str, Any]) -> None:
    in_workers = itertools.takewhile(
        lambda s: isinstance(s, p.Elementwise | p.sample) and not s.consumer, pipeline.stages
    )
    head = pipe(pipeline.source, *in_workers).seeded(pipeline.seed)  # what follows may depend on the order
    with execute(head, ordered=False, **way) as loader:
        assert Counter(map(repr, loader)) == Counter(map(repr, head))


@pytest.mark.parametrize("way", [way for way in WAYS if way["backend"] != "serial"])
def test_without_order_no_shard_waits_for_another(way: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    sharded = pipe(range(8), p.shard_by_worker(2), p.map(Gate(path, held=0)))
    with execute(sharded, workers=2, ordered=False, **way) as loader:
        outputs = iter(loader)
        assert [next(outputs) for _ in range(4)] == [1, 3, 5, 7]
        with open(path, "w", encoding="utf-8"):
            pass
        assert list(outputs) == [0, 2, 4, 6]


AUGMENTED = [
    pipe(range(50), p.sample(p.shuffled()), p.map(drawn_globally), p.map(jittered), p.batch(4)),
    pipe(p.from_iterable(range(50)), p.map(drawn_globally), p.batch(4), p.map(jittered)),
    pipe(range(50), p.shard_by_worker(3), p.map(drawn_globally), p.map(jittered)),
]


@pytest.mark.parametrize("pipeline", AUGMENTED, ids=["position", "stream", "shard"])
@every_process
def test_global_generators_obey_the_law(pipeline: p.Pipeline, method: str) -> None:
    with execute(pipeline, workers=2, start_method=method, seed=7) as loader:
        for epoch in range(3):
            assert same(list(loader), list(pipeline.seeded(7).at_epoch(epoch)))


@every_way
def test_a_generator_of_the_element_obeys_the_law(way: dict[str, Any]) -> None:
    pipeline = pipe(range(300), p.map(jittered), p.batch(7)).seeded(2)
    with execute(pipeline, workers=2, **way) as loader:
        assert list(loader) == list(pipeline)


@pytest.mark.parametrize("way", [*WAYS[:3], WAYS[4]], ids=name_of)
def test_the_generators_of_the_caller_are_neither_read_nor_written(way: dict[str, Any]) -> None:
    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()]

    for _ in range(3):
        random.gauss(0, 1)
    before, seen = states(), []
    with execute(pipe(range(20), p.map(drawn_globally)), workers=2, **way) as loader:
        for x in loader:
            seen.append(x)
            assert same(states(), before)
        random.seed(1)
        assert list(loader) == list(pipe(range(20), p.map(drawn_globally)).at_epoch(1))
    random.setstate(before[0])


def test_collated_results_are_equal_whatever_their_type() -> None:
    fields = {"x": np.arange(3000.0), "y": "text", "z": (1, None), "w": b"bytes" * 500, "t": torch.arange(700)}
    pipeline = pipe([fields] * 9, p.batch(2), p.collate())
    for method in ("fork", "forkserver"):
        with execute(pipeline, workers=2, start_method=method) as loader:
            assert same(list(loader), list(pipeline))


# Law 11 ---------------------------------------------------------------------------------------------------------------

OURS = ("pipes: raised in worker",)


def run(outputs: Any) -> tuple[list[Any], BaseException | None]:
    """Return what came before an exception, and the exception."""
    got: list[Any] = []
    try:
        got.extend(outputs)
    except Exception as error:
        return got, error
    return got, None


def described(error: BaseException | None) -> Any:
    """What must be the same everywhere; the worker's own note is beside the point."""
    if error is None:
        return None
    notes = [n for n in getattr(error, "__notes__", ()) if not n.startswith(OURS)]
    fields = {k: v for k, v in vars(error).items() if k != "__notes__"}
    return type(error), error.args, str(error), fields, notes, described(error.__cause__)


def check_errors(pipeline: p.Pipeline, way: dict[str, Any]) -> None:
    expected, failure = run(pipeline)
    with execute(pipeline, **way) as loader:
        got, error = run(loader)
        assert same(got, expected)
        assert described(error) == described(failure)
        again, same_error = run(execute_again(loader, pipeline))
        assert same(again, expected)
        assert described(same_error) == described(failure)


def execute_again(loader: p.Loader, pipeline: p.Pipeline) -> Iterator[Any]:
    """Run the same epoch once more: workers survive an exception."""
    loader.set_epoch(pipeline.epoch)
    return iter(loader)


def with_fault(pipeline: p.Pipeline, place: int, modulus: int, kind: str) -> p.Pipeline:
    place = min(place, len(pipeline.stages))
    before, after = pipeline.stages[:place], pipeline.stages[place:]
    made = pipe(pipeline.source, *before, p.map(Faulty(modulus, kind)), *after)
    return made.seeded(pipeline.seed).at_epoch(pipeline.epoch)


@settings(max_examples=settings().max_examples * 2)
@given(pipelines(), st.integers(0, 5), st.integers(2, 9), st.sampled_from(KINDS), ways())
def test_what_precedes_an_exception_is_delivered_and_then_the_exception(
    pipeline: p.Pipeline, place: int, modulus: int, kind: str, way: dict[str, Any]
) -> None:
    check_errors(with_fault(pipeline, place, modulus, kind), way)


@given(
    pipelines_that_draw_by_rng_only(),
    st.integers(0, 5),
    st.integers(2, 9),
    st.sampled_from(KINDS),
    ways(threads=True),
)
def test_exceptions_in_threads_are_those_of_the_serial_run(
    pipeline: p.Pipeline, place: int, modulus: int, kind: str, way: dict[str, Any]
) -> None:
    check_errors(with_fault(pipeline, place, modulus, kind), way)


@pytest.mark.parametrize("way", [WAYS[0], *WAYS[2:]], ids=name_of)
@pytest.mark.parametrize("kind", ["two", "noted"])
def test_an_exception_keeps_what_it_is(way: dict[str, Any], kind: str) -> None:
    pipeline = pipe(range(30), p.map(FailsAt(17, kind)), p.map(doubled))
    expected, failure = run(pipeline)
    assert expected == [2 * i for i in range(17)]
    with execute(pipeline, workers=2, **way) as loader:
        got, error = run(loader)
    assert got == expected
    assert described(error) == described(failure)
    assert "input position 17" in "".join(builtins.map(str, [error, *getattr(error, "__notes__", [])]))


def test_an_exception_from_a_worker_shows_the_traceback_there() -> None:
    with (
        execute(pipe(range(5), p.map(FailsAt(2))), workers=1, start_method="fork") as loader,
        pytest.raises(RuntimeError) as caught,
    ):
        list(loader)
    assert any("raise_a" in note and "Traceback" in note for note in caught.value.__notes__)


def test_an_exception_with_a_field_that_cannot_be_sent_arrives_without_it() -> None:
    def fails(_: int) -> int:
        error = RuntimeError("has a lock", threading.Lock())
        error.lock, error.code = threading.Lock(), 3  # type: ignore[attr-defined]
        raise error

    with execute(pipe(range(5), p.map(fails)), workers=1, start_method="fork") as loader:
        with pytest.raises(RuntimeError, match="has a lock") as caught:
            list(loader)
        assert type(caught.value) is RuntimeError
        assert caught.value.args == ("has a lock", "<lock>")
        assert vars(caught.value)["code"] == 3
        assert not hasattr(caught.value, "lock")


def test_an_exception_that_cannot_be_sent_at_all_is_told() -> None:
    class OddError(Exception):
        def __new__(cls) -> OddError:
            return super().__new__(cls)

        def __init__(self) -> None:
            super().__init__("odd", threading.Lock())

        def __reduce__(self) -> Any:
            raise TypeError("no")

    def fails(_: int) -> int:
        raise OddError

    with (
        execute(pipe(range(5), p.map(fails)), workers=1, start_method="fork") as loader,
        pytest.raises(WorkerError, match=r"(?s)OddError was raised in a worker.*in fails"),
    ):
        list(loader)


def test_causes_in_a_cycle_arrive_once() -> None:
    def fails(_: int) -> int:
        first, second = RuntimeError("first"), RuntimeError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    with execute(pipe(range(5), p.map(fails)), workers=1, start_method="fork") as loader:
        with pytest.raises(RuntimeError, match="first") as caught:
            list(loader)
        assert str(caught.value.__cause__) == "second"


@every_way
def test_a_long_or_endless_unit_is_given_in_parts(way: dict[str, Any]) -> None:
    endless = pipe(range(10), p.flat_map(itertools.count), p.take(3000))
    long = pipe(range(5), p.flat_map(lambda i: range(i, i + 4000)), p.filter(lambda x: x % 3), p.batch(7))
    for pipeline in (endless, long):
        with execute(pipeline, workers=2, **way) as loader:
            assert list(loader) == list(pipeline)
            half = list(itertools.islice(loader, 300))
            state = loader.state_dict()
        with execute(pipeline, workers=1, **way) as again:
            again.load_state_dict(state)
            assert half + list(again) == list(pipeline.at_epoch(1))


def test_a_timeout_while_a_worker_starts_says_so() -> None:
    with (
        execute(pipe(range(3), p.map(doubled)), workers=1, timeout=0.001, start_method="spawn") as loader,
        pytest.raises(p.WorkerTimeoutError, match="its start"),
    ):
        list(loader)


@every_way
def test_the_failure_of_a_streams_source_comes_after_what_it_gave(way: dict[str, Any]) -> None:
    def numbers() -> Iterator[int]:
        yield from range(11)
        raise CustomError("source", code=3)

    pipeline = pipe(p.from_iterable(numbers), p.map(doubled))
    with execute(pipeline, workers=2, **way) as loader:
        got, error = run(loader)
    assert got == [2 * i for i in range(11)]
    assert described(error) == described(run(pipeline)[1])


@every_process
def test_classes_of_functions_are_the_same_classes_here(method: str) -> None:
    class MineError(Exception):
        pass

    class Result:
        pass

    def works(x: int) -> Result:
        if x:
            raise MineError(x)
        return Result()

    with execute(pipe([0, 1], p.map(works)), workers=1, start_method=method) as loader:
        (result,), error = run(loader)
    assert type(result) is Result
    assert type(error) is MineError


@pytest.mark.parametrize("way", CHEAP, ids=name_of)
def test_a_base_exception_of_user_code_is_no_hang(way: dict[str, Any]) -> None:
    class Stop(BaseException):
        pass

    def stops(x: int) -> int:
        if x == 5:
            raise Stop(x)
        return x

    with execute(pipe(range(9), p.map(stops)), workers=2, timeout=5, **way) as loader:
        for _ in range(2):  # a loader is of use after an error, or says that it is not
            with pytest.raises((Stop, WorkerError)) as caught:
                list(loader)
            assert not isinstance(caught.value, TimeoutError)


# The loader -----------------------------------------------------------------------------------------------------------


@every_way
def test_each_iteration_is_the_next_epoch(way: dict[str, Any]) -> None:
    pipeline = pipe(range(20), p.sample(p.shuffled()), p.batch(3))
    with execute(pipeline, workers=2, seed=3, epoch=4, **way) as loader:
        assert (loader.seed, loader.epoch, len(loader), bool(loader)) == (3, 4, 7, True)
        assert list(loader) == list(pipeline.seeded(3).at_epoch(4))
        assert list(loader) == list(pipeline.seeded(3).at_epoch(5))
        assert loader.epoch == 6
        loader.set_epoch(1)
        assert list(loader) == list(pipeline.seeded(3).at_epoch(1))
        for _ in loader:
            break
        assert loader.epoch == 3
        assert list(loader) == list(pipeline.seeded(3).at_epoch(3))


@pytest.mark.parametrize("way", CHEAP, ids=name_of)
def test_a_loader_is_as_long_as_its_pipeline(way: dict[str, Any]) -> None:
    with execute(pipe(p.from_iterable(range(5)), p.map(str)), workers=1, **way) as loader:
        with pytest.raises(TypeError, match="length"):
            len(loader)
        assert bool(loader)


@pytest.mark.parametrize("way", CHEAP, ids=name_of)
def test_a_newer_iteration_ends_an_older_one(way: dict[str, Any]) -> None:
    with execute(pipe(range(20), p.map(doubled)), workers=2, **way) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        assert next(newer) == 0
        with pytest.raises(RuntimeError, match="newer iteration"):
            next(older)
        assert list(newer) == list(range(2, 40, 2))
        with pytest.raises(RuntimeError, match="newer iteration"):
            list(zip(loader, loader))
        assert list(loader) == list(range(0, 40, 2))


@pytest.mark.parametrize("way", CHEAP, ids=name_of)
def test_an_older_iteration_may_end_before_it_began(way: dict[str, Any]) -> None:
    with execute(pipe(range(20), p.map(doubled)), workers=2, **way) as loader:
        older, newer = iter(loader), iter(loader)
        assert list(newer) == list(range(0, 40, 2))
        with pytest.raises(RuntimeError, match="newer iteration"):
            next(older)


@pytest.mark.parametrize("way", CHEAP, ids=name_of)
def test_a_closed_loader_says_so(way: dict[str, Any]) -> None:
    loader = execute(pipe(range(20), p.map(doubled)), workers=2, **way)
    running = iter(loader)
    assert next(running) == 0
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        iter(loader)
    with pytest.raises(RuntimeError, match="closed"):
        next(running)
    with execute(pipe([1]), **way) as loader:
        assert list(loader) == [1]
    with pytest.raises(RuntimeError, match="closed"):
        list(loader)


@pytest.mark.parametrize("way", CHEAP, ids=name_of)
def test_what_follows_the_exception_of_an_iterator_is_its_end(way: dict[str, Any]) -> None:
    with execute(pipe(range(20), p.map(FailsAt(3))), workers=2, **way) as loader:
        running = iter(loader)
        assert list(itertools.islice(running, 3)) == [0, 1, 2]
        with pytest.raises(RuntimeError):
            next(running)
        assert list(running) == []


def test_workers_persist_between_epochs_if_they_may() -> None:
    pipeline = pipe(range(40), p.map(pid_of))
    with execute(pipeline, workers=2, start_method="fork") as loader:
        assert len({*loader, *loader, *loader}) <= 2
        assert os.getpid() not in {*loader}
    with execute(pipeline, workers=1, start_method="fork", persistent=False) as loader:
        assert len({*loader} | {*loader} | {*loader}) == 3


def test_without_persistence_no_worker_is_left_between_epochs() -> None:
    with execute(pipe(range(40), p.map(pid_of)), workers=2, start_method="fork", persistent=False) as loader:
        for _ in range(2):
            pids = set(loader)
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        running = iter(loader)
        pid = next(running)
        running.close()  # type: ignore[attr-defined]  # as a `break` does
        assert not Path(f"/proc/{pid}").exists()


def test_a_loader_prints_as_the_code_that_made_it() -> None:
    loader = execute(pipe(range(5), p.batch(2)), workers=2, start_method="fork", backend="process", epoch=1)
    assert repr(loader).startswith("execute(pipe(")
    for part in ("range(0, 5)", "batch(2)", "workers=2", "start_method='fork'"):
        assert part in repr(loader)
    assert " at 0x" not in repr(loader)
    assert "backend='thread'" in repr(execute(pipe([1]), workers=1, backend="thread"))


def test_any_source_may_be_executed() -> None:
    assert list(execute([3, 4])) == [3, 4]
    with execute(p.from_map(range(3)), workers=1, start_method="fork") as loader:
        assert list(loader) == [0, 1, 2]


# Where code runs ------------------------------------------------------------------------------------------------------


@every_way
def test_user_code_is_told_where_it_runs(way: dict[str, Any]) -> None:
    with execute(pipe(range(30), p.map(told)), workers=2, seed=9, epoch=4, **way) as loader:
        infos = set(loader)
        here = way.get("backend") == "serial"
        assert {(i.workers, i.seed, i.epoch) for i in infos} == {(0 if here else 2, 9, 4)}
        assert {(i.shard, i.shards) for i in infos} == {(None, None)}
        assert {i.worker for i in infos} <= ({0} if here else {0, 1})
        assert {i.epoch for i in loader} == {5}
        assert p.worker_info() is None


@pytest.mark.parametrize("way", CHEAP, ids=name_of)
def test_shards_are_told(way: dict[str, Any]) -> None:
    pipeline = pipe(range(30), p.shard_by_worker(3), p.map(told))
    with execute(pipeline, workers=2, **way) as loader:
        assert [(i.shard, i.shards) for i in loader] == [(i % 3, 3) for i in range(30)]
    assert p.worker_info() is None


@every_process
def test_each_worker_is_initialised_with_its_number(method: str) -> None:
    with execute(
        pipe(range(40), p.map(number_given)), workers=2, start_method=method, worker_init=initialised
    ) as loader:
        assert {(given, str(number)) for given, number in loader} <= {("0", "0"), ("1", "1")}


def test_each_thread_is_initialised_with_its_number() -> None:
    numbers: list[int] = []
    with execute(pipe(range(9), p.map(str)), workers=3, backend="thread", worker_init=numbers.append) as loader:
        assert len(list(loader)) == 9
        assert len(list(loader)) == 9
    assert sorted(numbers) == [0, 1, 2]


@pytest.mark.parametrize("way", WAYS[:4], ids=name_of)
def test_an_initialisation_that_raises_is_an_error_each_time(way: dict[str, Any]) -> None:
    with execute(pipe(range(9), p.map(str)), workers=2, worker_init=refusing, timeout=5, **way) as loader:
        for _ in range(3):
            with pytest.raises(CustomError, match="refused") as caught:
                list(loader)
            assert caught.value.code == 5


def test_auto_is_as_many_as_there_are_processors_to_use() -> None:
    usable = os.sched_getaffinity(0)
    with execute(pipe(range(9), p.map(told)), workers="auto", start_method="fork") as loader:
        assert 1 <= next(iter(loader)).workers <= len(usable)
    os.sched_setaffinity(0, {min(usable)})
    try:
        with execute(pipe(range(9), p.map(told)), workers="auto", start_method="fork") as loader:
            assert next(iter(loader)).workers == 1
    finally:
        os.sched_setaffinity(0, usable)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"workers": -1}, ValueError, "`workers` must be >= 0, got -1"),
        ({"workers": 1.5}, TypeError, "`workers` must be an integer, got 1.5"),
        ({"workers": True}, TypeError, "`workers` must be an integer, got True"),
        ({"workers": "many"}, ValueError, "`workers` must be an integer or \"auto\", got 'many'"),
        ({"workers": None}, TypeError, "`workers` must be an integer, got None"),
        ({"backend": "threads"}, ValueError, "`backend` must be one of 'process', 'thread', 'serial', got 'threads'"),
        ({"backend": None}, ValueError, "`backend` must be one of"),
        ({"start_method": "vfork"}, ValueError, "`start_method` must be one of 'forkserver', 'spawn', 'fork'"),
        ({"prefetch": 0}, ValueError, "`prefetch` must be >= 1, got 0"),
        ({"prefetch": 1.0}, TypeError, "`prefetch` must be an integer, got 1.0"),
        ({"timeout": 0}, ValueError, "`timeout` must be > 0"),
        ({"timeout": -1.0}, ValueError, "`timeout` must be > 0"),
        ({"timeout": float("nan")}, ValueError, "`timeout` must be > 0"),
        ({"timeout": True}, (TypeError, ValueError), "`timeout`"),
        ({"timeout": "1"}, (TypeError, ValueError), "`timeout`"),
        ({"restarts": -1}, ValueError, "`restarts` must be >= 0, got -1"),
        ({"ordered": 1}, TypeError, "`ordered` must be True or False, got 1"),
        ({"persistent": None}, TypeError, "`persistent` must be True or False, got None"),
        ({"worker_init": 3}, TypeError, "`worker_init` must be callable, got 3"),
        ({"seed": 0.5}, TypeError, "`seed` must be an integer"),
        ({"epoch": -1}, ValueError, "`epoch` must be >= 0"),
    ],
    ids=str,
)
def test_a_bad_argument_is_an_error(arguments: dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(kind) as caught:
        execute(pipe(range(3), p.map(str)), **arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_part_that_cannot_be_serialised_is_named_before_a_process_starts(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipes.execution import launch

    started: list[object] = []
    monkeypatch.setattr(launch, "start", lambda *a: started.append(a))
    with execute(pipe(range(9), p.map(doubled), p.map(Lock())), workers=2, start_method=method) as loader:
        with pytest.raises(WorkerError) as caught:
            next(iter(loader))
        assert "map(" in str(caught.value)
        assert "inner['deep'][0]" in str(caught.value)
        assert "lock" in str(caught.value)
    assert not started


def test_a_captured_variable_that_cannot_be_serialised_is_named() -> None:
    lock = threading.Lock()

    def waits(x: int) -> int:
        with lock:
            return x

    with execute(pipe(range(9), p.map(waits)), workers=1) as loader, pytest.raises(WorkerError, match="<lock>"):
        next(iter(loader))
    with execute(pipe(range(9), p.map(waits)), workers=1, start_method="fork") as loader:
        assert list(loader) == list(range(9))


def test_what_only_the_consumer_runs_need_not_be_serialisable() -> None:
    lock = threading.Lock()

    def held(elements: Iterator[Any]) -> Iterator[Any]:
        with lock:
            yield from elements

    with execute(pipe(range(9), p.map(doubled), p.filter(bool), held, p.take(3)), workers=1) as loader:
        assert list(loader) == [2, 4, 6]


@every_process
def test_a_result_that_cannot_be_serialised_is_an_error_with_its_position(method: str) -> None:
    for pipeline in (
        pipe(range(9), p.map(lock_at_three)),
        pipe(p.from_iterable(range(9)), p.map(lock_at_three)),
        pipe(range(9), p.shard_by_worker(1), p.map(lock_at_three)),
    ):
        with execute(pipeline, workers=1, start_method=method) as loader:
            got, error = run(loader)
        assert got == [0, 1, 2]
        assert isinstance(error, WorkerError)
        assert "lock" in str(error)
        assert re.search("(position|output|unit) 3", "".join([str(error), *error.__notes__])), pipeline


@every_process
def test_a_tensor_on_an_accelerator_is_an_error_with_its_position(method: str) -> None:
    with execute(pipe(range(9), p.map(meta_at_three)), workers=1, start_method=method) as loader:
        got, error = run(loader)
    assert got == [0, 1, 2]
    assert isinstance(error, WorkerError)
    assert "meta" in str(error)
    assert re.search("(position|output|unit) 3", "".join([str(error), *error.__notes__]))


def test_a_stream_of_what_pickle_alone_cannot_carry_arrives() -> None:
    class Item:
        def __init__(self, n: int) -> None:
            self.n = n

    functions: list[Callable[[], int]] = [lambda: 1, lambda: 2]
    for method in PROCESSES:
        with execute(pipe(p.from_iterable(functions), p.map(lambda f: f())), workers=1, start_method=method) as loader:
            assert list(loader) == [1, 2]
        items = pipe(p.from_iterable([Item(5)]), p.map(lambda item: item.n))
        with execute(items, workers=1, start_method=method) as loader:
            assert list(loader) == [5]


def test_a_drawn_element_that_cannot_be_shipped_is_an_error_with_its_position() -> None:
    elements = [1, 2, threading.Lock(), 4]
    with execute(pipe(p.from_iterable(elements), p.map(str)), workers=1, start_method="fork") as loader:
        got, error = run(loader)
    assert got == ["1", "2"]
    assert re.search("(position|element|output|unit) 2", "".join([str(error), *getattr(error, "__notes__", [])]))
    assert "lock" in str(error)


# Memory ---------------------------------------------------------------------------------------------------------------


@every_way
def test_a_received_array_is_the_receivers_own(way: dict[str, Any]) -> None:
    pipeline = pipe(range(40), p.map(big))
    with execute(pipeline, workers=2, prefetch=4, **way) as loader:
        kept = []
        for i, array in enumerate(loader):
            assert array.flags.writeable
            assert (array == i).all()
            np.add(array, 0.5, out=array)
            kept.append(array)
    assert all((array == i + 0.5).all() for i, array in enumerate(kept))


@every_process
def test_collated_tensors_are_the_receivers_own(method: str) -> None:
    pipeline = pipe(p.from_arrays(np.arange(40_000.0).reshape(40, 1000)), p.batch(8), p.collate())
    with execute(pipeline, workers=2, start_method=method) as loader:
        kept = list(loader)
    for (x,) in kept:
        x.mul_(2)
    assert same([x for (x,) in kept], [x * 2 for (x,) in pipeline])


@every_process
def test_a_write_of_a_worker_is_seen_by_nobody_else(method: str) -> None:
    arrays: list[Any] = [np.full(100_000, 7.0), p.share(np.full(100_000, 7.0))]
    for array in [*arrays, torch.full((100_000,), 7.0)][: 2 if method == "spawn" else 3]:
        with execute(pipe(Local(array)), workers=2, start_method=method, prefetch=1) as loader:
            firsts: dict[int, list[float]] = {}
            for first, pid in loader:
                firsts.setdefault(pid, []).append(first)
        assert os.getpid() not in firsts
        assert all(seen[0] == 7.0 and 7.0 not in seen[1:] for seen in firsts.values())
        assert float(array[0]) == 7.0


def test_share_copies_what_it_is_given() -> None:
    table = np.arange(12).reshape(3, 4)
    for made in (table, table.T, np.zeros((0, 3)), np.float32(3), np.array(4)):
        shared = p.share(made)
        assert same(shared, np.asarray(made))
        shared[...] = 5
        assert made is not shared
    tensor = torch.arange(6).reshape(2, 3)
    assert same(p.share(tensor), tensor)
    with pytest.raises(TypeError, match="objects cannot be shared"):
        p.share(np.array([None]))


@every_process
def test_arrays_arrive_however_they_are_made(method: str, tmp_path: Path) -> None:
    whole = np.memmap(tmp_path / "data", np.int64, "w+", shape=(4000, 2))
    whole[:] = np.arange(8000).reshape(4000, 2)
    whole.flush()
    shared = p.share(np.arange(8000))
    tables: list[Any] = [
        whole,
        whole[100:],
        whole[100:, 1],
        np.memmap(tmp_path / "data", np.int64, "r"),
        np.memmap(tmp_path / "data", np.int64, "r", offset=4104)[3:],
        shared,
        shared[10:7000],
        shared[::-1],
        shared[::3],
        torch.arange(5000.0)[7:],
        np.asfortranarray(np.arange(6000).reshape(3000, 2)),
    ]
    with execute(pipe(range(50), p.map(ReadsAll(tables))), workers=1, start_method=method) as loader:
        assert same(list(loader), [[table[i] for table in tables] for i in range(50)])


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_memmap_travels_as_its_files_name(method: str, tmp_path: Path) -> None:
    np.arange(50_000).tofile(tmp_path / "data")
    table = np.memmap(tmp_path / "data", np.int64, "r")
    with execute(pipe(range(3), p.map(Describes(table))), workers=1, start_method=method) as loader:
        assert list(loader) == [("memmap", str(tmp_path / "data"), i) for i in range(3)]


@every_process
def test_a_memmap_with_private_changes_arrives_with_them(method: str, tmp_path: Path) -> None:
    np.arange(5000).tofile(tmp_path / "data")
    table = np.memmap(tmp_path / "data", np.int64, "c")
    table[:] = 7
    with execute(pipe(range(3), p.map(Reads(table))), workers=1, start_method=method) as loader:
        assert list(loader) == [7, 7, 7]


@every_process
def test_a_memmap_of_a_removed_file_arrives(method: str, tmp_path: Path) -> None:
    np.arange(5000).tofile(tmp_path / "data")
    table = np.memmap(tmp_path / "data", np.int64, "r")
    (tmp_path / "data").unlink()
    with execute(pipe(range(3), p.map(Reads(table))), workers=1, start_method=method) as loader:
        assert list(loader) == [0, 1, 2]


def long_lists() -> dict[str, list[Any]]:
    return {
        "dicts": [{"i": i, "name": str(i)} for i in range(12_000)],
        "ints": list(range(12_000)),
        "function": [*range(7), doubled, *range(12_000)],
        "objects": [Reads(i) for i in range(12_000)],
    }


@every_process
@pytest.mark.parametrize("name", long_lists())
def test_a_long_list_arrives(method: str, name: str) -> None:
    items = long_lists()[name]
    pipeline = pipe(items, p.sample(range(0, 12_000, 500)), p.map(repr_of))
    with execute(pipeline, workers=2, start_method=method) as loader:
        assert list(loader) == list(pipeline)


@every_process
def test_a_long_list_with_one_item_that_only_cloudpickle_carries_arrives(method: str) -> None:
    items: list[Any] = [*range(7), lambda: 0, *range(12_000)]
    pipeline = pipe(items, p.sample(range(12)), p.map(callable))
    with execute(pipeline, workers=1, start_method=method) as loader:
        assert list(loader) == list(pipeline)


@every_process
def test_a_long_list_that_a_function_uses_is_a_list(method: str) -> None:
    table = list(range(12_000))

    def uses(i: int) -> Any:
        return isinstance(table, list), len([*table, i]), table == list(range(12_000)), (table + [i])[-1]  # noqa: RUF005

    pipeline = pipe(range(3), p.map(uses))
    with execute(pipeline, workers=1, start_method=method) as loader:
        assert list(loader) == list(pipeline)


@every_process
def test_many_shared_parts_arrive(method: str) -> None:
    tables = [p.share(np.full(2000, i)) for i in range(300)]
    pipeline = pipe(range(300), p.map(lambda i: int(tables[i][0])))
    with execute(pipeline, workers=1, start_method=method) as loader:
        assert list(loader) == list(range(300))


# Where it is used -----------------------------------------------------------------------------------------------------

GUARDLESS = """
from dataclasses import dataclass

@dataclass
class Item:
    n: int

class Mine(Exception):
    pass

def make(x):
    return Item(x + 1)

def fails(x):
    raise Mine(x)

offset = 10
loader = p.execute(p.pipe(range(40), p.map(make), p.map(lambda i: Item(i.n + offset))), workers=2, start_method=METHOD)
with loader:
    assert list(loader) == [Item(i + 11) for i in range(40)]
with p.execute(p.pipe(p.from_iterable(map(Item, range(5))), p.map(lambda i: i.n)), workers=1, start_method=METHOD) as l:
    assert list(l) == [0, 1, 2, 3, 4]
with p.execute(p.pipe([Item(3)], p.map(fails)), workers=1, start_method=METHOD) as l:
    try:
        list(l)
    except Mine as error:
        assert error.args == (Item(3),)
print("done")
"""


@pytest.mark.parametrize(
    ("how", "method"), [("file", "fork"), ("file", "forkserver"), ("-", "forkserver"), ("-c", "spawn"), ("-", "spawn")]
)
def test_scripts_need_no_main_guard(how: str, method: str, tmp_path: Path) -> None:
    assert run_script(GUARDLESS, how=how, folder=tmp_path, method=method) == "done\n"


@pytest.mark.parametrize("work", [nested, nested_by_default])
@every_process
def test_a_worker_may_execute_a_pipeline(method: str, work: Callable[[int], list[int]]) -> None:
    with execute(pipe(range(4), p.map(work)), workers=1, start_method=method) as loader:
        assert list(loader) == [[2 * i for i in range(n)] for n in range(4)]


def answer_of_fork(work: Callable[[], bool]) -> int:
    """Run something in a forked child and return its exit code."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_loader_may_be_used_in_a_forked_child(method: str) -> None:
    pipeline = pipe(range(300), p.map(doubled))
    with execute(pipeline, workers=2, start_method=method) as loader:
        open_iterator = iter(loader)
        assert next(open_iterator) == 0

        def run_and_close() -> bool:
            outputs = list(loader)
            loader.close()
            return outputs == [2 * i for i in range(300)]

        assert answer_of_fork(run_and_close) == 0
        assert list(open_iterator) == [2 * i for i in range(1, 300)]
        assert list(loader) == [2 * i for i in range(300)]


def test_an_open_iterator_is_of_no_use_in_a_forked_child() -> None:
    with execute(pipe(range(300), p.map(doubled)), workers=2, start_method="fork") as loader:
        open_iterator = iter(loader)
        assert next(open_iterator) == 0

        def goes_on() -> bool:
            try:
                list(open_iterator)
            except RuntimeError:
                return True
            return False

        assert answer_of_fork(goes_on) == 0
        assert list(open_iterator) == [2 * i for i in range(1, 300)]


TORCH_FREE = """
import tasks
pipeline = p.pipe(range(8), p.map(tasks.has_torch), p.batch(4), p.collate())
for _ in range(2):
    with p.execute(pipeline, workers=2, start_method=METHOD) as loader:
        batches = list(loader)
    import torch
    assert all(isinstance(b, torch.Tensor) for b in batches)
    assert torch.cat(batches).tolist() == [[i, 0] for i in range(8)]
print("done")
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_leave_torch_alone_and_the_consumer_gets_tensors(method: str, tmp_path: Path) -> None:
    assert run_script(TORCH_FREE, folder=tmp_path, method=method) == "done\n"


def samplers() -> dict[str, Callable[[], Any]]:
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

    return {
        "random": lambda: RandomSampler(range(20)),
        "replacement": lambda: RandomSampler(range(20), replacement=True, num_samples=30),
        "subset": lambda: SubsetRandomSampler([3, 4, 5, 9]),
        "batch": lambda: BatchSampler(SequentialSampler(range(20)), 3, drop_last=False),
        "batch of random": lambda: BatchSampler(RandomSampler(range(20)), 3, drop_last=True),
    }


@pytest.mark.parametrize("name", samplers())
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_samplers_of_torch_draw_the_same_with_workers(name: str, method: str) -> None:
    pipeline = pipe(range(100, 120), p.sample(samplers()[name]()), p.map(repr)).seeded(4)
    with execute(pipeline, workers=2, start_method=method) as loader:
        for epoch in range(2):
            torch.manual_seed(epoch)
            serial = list(pipeline.at_epoch(epoch))
            torch.manual_seed(epoch + 77)
            before = torch.get_rng_state()
            assert list(loader) == serial
            assert torch.equal(torch.get_rng_state(), before)


@every_process
def test_the_source_of_a_stream_stays_in_the_consumer(method: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stream = Locked(str(tmp_path / "file"))
    with execute(pipe(p.from_iterable(stream), p.map(with_pid)), workers=2, start_method=method) as loader:
        for epoch in range(2):
            outputs = list(loader)
            assert [i for (i, _, _), _ in outputs] == list(range(20)), epoch
            assert {pid for (_, made, drawn), _ in outputs for pid in (made, drawn)} == {os.getpid()}
            assert os.getpid() not in {pid for _, pid in outputs}
    stream.file.close()
