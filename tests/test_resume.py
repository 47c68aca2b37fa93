"""States: cut anywhere, go on with any other number of workers or ranks, and nothing is lost, doubled or moved.

Law 4 over chains of cuts, with and without killed workers; law 5 over ranks, shards and uneven ends; and what a state
is: small, JSON-able, counting what was received, and an error where it does not belong.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import pipelines
from tasks import FailsAt, Kills, doubled, drawn_globally, jittered, untouched

import pipes as p
from pipes import Loader, Pipeline, execute, pipe
from pipes.testing.strategies import Counting, chained, most, tagged
from pipes.testing.strategies import doubled as none_or_two
from pipes.values import same

pytestmark = pytest.mark.filterwarnings("ignore:resuming replays:UserWarning")

EPOCHS = 3
ALL = -1
FEW = settings(max_examples=max(10, settings().max_examples // 4))
FORK: dict[str, Any] = {"start_method": "fork"}
ENDS = ["keep", "drop", "pad"]

type State = dict[str, Any]
type Outputs = list[list[Any]]


# Law 4 ----------------------------------------------------------------------------------------------------------------


def walk(loader: Loader, got: Outputs, first: int, calls: int, before: Callable[[], None] = lambda: None) -> State:
    """Call `next` so many times over epochs `first`..., counting those that find an epoch's end; return the state."""
    while (epoch := loader.epoch - first) < len(got):
        outputs = iter(loader)
        while True:
            if calls == 0:
                return loader.state_dict()
            calls -= 1
            before()
            try:
                got[epoch].append(next(outputs))
            except StopIteration:
                break
    return loader.state_dict()


def uninterrupted(pipeline: Pipeline, epochs: int = EPOCHS) -> Outputs:
    return [list(pipeline.at_epoch(pipeline.epoch + e)) for e in range(epochs)]


def by_json(state: State) -> State:
    again: State = json.loads(json.dumps(state))
    assert again == state
    return again


def check_chain(pipeline: Pipeline, legs: list[tuple[int, dict[str, Any]]], **options: Any) -> None:
    """Cut behind each leg, go on with a fresh loader, run the last leg to the end, and compare."""
    got: Outputs = [[] for _ in range(EPOCHS)]
    state: State | None = None
    for i, (calls, way) in enumerate(legs):
        with execute(pipeline, **way, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
                assert loader.state_dict() == state
            cut = walk(loader, got, pipeline.epoch, ALL if i == len(legs) - 1 else calls)
            assert loader.state_dict() == cut, "the end of an abandoned iterator changed the state"
            state = by_json(cut)
    for epoch, (mine, whole) in enumerate(zip(got, uninterrupted(pipeline), strict=True)):
        assert same(mine, whole), f"epoch {epoch}: {mine}, not {whole}, with {legs}"
    assert state is not None
    assert state["epoch"] == pipeline.epoch + EPOCHS


def ways(*, threads: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    backends = st.just({"backend": "thread"}) if threads else st.sampled_from([FORK, FORK, FORK, {"backend": "serial"}])
    workers, prefetch = st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 2, 4])
    return st.builds(lambda b, w, f: {**b, "workers": w, "prefetch": f}, backends, workers, prefetch)


def legs(*, threads: bool = False) -> st.SearchStrategy[list[tuple[int, dict[str, Any]]]]:
    return st.lists(st.tuples(st.integers(0, 25), ways(threads=threads)), min_size=2, max_size=4)


@settings(max_examples=settings().max_examples * 2)
@given(pipelines(), legs())
def test_a_chain_of_cuts_changes_nothing(pipeline: Pipeline, legs: list[tuple[int, dict[str, Any]]]) -> None:
    check_chain(pipeline, legs)


@given(pipelines(size=40, stages_at_most=3), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_a_chain_of_cuts_changes_nothing_in_the_serial_run(pipeline: Pipeline, calls: list[int]) -> None:
    check_chain(pipeline, [(n, {"workers": 0}) for n in [*calls, 0]])


def pipelines_that_draw_by_rng_only() -> st.SearchStrategy[Pipeline]:
    """Draw pipelines that threads can run: they share the global generators."""
    size = st.integers(1, 5)
    stage: st.SearchStrategy[Any] = st.one_of(
        st.sampled_from([p.map(tagged), p.map(jittered), p.filter(most), p.flat_map(none_or_two), chained]),
        size.map(p.batch),
        size.map(p.shuffle_buffer),
        st.integers(1, 3).map(p.repeat),
        st.integers(0, 9).map(p.take),
        st.integers(1, 4).map(p.shard_by_worker),
    )
    source = st.sampled_from([p.from_map(range(23)), p.from_iterable(Counting(23)), p.from_arrays(np.arange(23))])

    def assembled(source: p.Source, stages: list[Any], seed: int) -> Pipeline:
        first = next((i for i, s in enumerate(stages) if isinstance(s, p.shard_by_worker)), len(stages))
        kept = [s for i, s in enumerate(stages) if i <= first or not isinstance(s, p.shard_by_worker)]
        return pipe(source, *kept).seeded(seed)

    return st.builds(assembled, source, st.lists(stage, max_size=5), st.integers(0, 3))


@given(pipelines_that_draw_by_rng_only(), legs(threads=True))
def test_a_chain_of_cuts_changes_nothing_in_threads(pipeline: Pipeline, legs: list[tuple[int, dict[str, Any]]]) -> None:
    check_chain(pipeline, legs)


def windows() -> Pipeline:
    return pipe(range(100), p.shard_by_worker(4), p.shuffle_buffer(10)).seeded(5)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 3), (3, 2), (2, 0)])
def test_four_shards_of_windows_can_be_cut_at_every_place(before: int, after: int) -> None:
    whole = uninterrupted(windows(), 2)
    assert sorted(whole[0]) == list(range(100))
    assert whole[0] != whole[1]
    with execute(windows(), workers=before, **FORK) as first, execute(windows(), workers=after, **FORK) as second:
        for calls in range(103):
            got: Outputs = [[], []]
            first.set_epoch(0)
            second.load_state_dict(by_json(walk(first, got, 0, calls)))
            walk(second, got, 0, ALL)
            assert got == whole, f"cut after {calls} calls"


# Killed workers -------------------------------------------------------------------------------------------------------


def children() -> set[int]:
    return {int(x) for task in Path("/proc/self/task").glob("*/children") for x in task.read_text().split()}


def kill(pid: int) -> None:
    """Kill a process and wait until it is dead."""
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        assert select.select([fd], [], [], 10)[0]
    finally:
        os.close(fd)


@FEW
@given(
    pipelines(),
    st.lists(st.tuples(st.integers(0, 25), st.integers(1, 3)), min_size=2, max_size=3),
    st.sets(st.integers(0, 40), min_size=1, max_size=4),
)
def test_a_chain_of_cuts_with_workers_killed_in_between_changes_nothing(
    pipeline: Pipeline, legs: list[tuple[int, int]], kills: set[int]
) -> None:
    before, moments, got = children(), itertools.count(), [[] for _ in range(EPOCHS)]  # type: tuple[Any, Any, Outputs]

    def strike() -> None:
        moment = next(moments)
        alive = sorted(children() - before)
        if moment in kills and alive:
            kill(alive[moment % len(alive)])

    state: State | None = None
    for i, (calls, workers) in enumerate(legs):
        with execute(pipeline, workers=workers, restarts=9, **FORK) as loader:
            if state is not None:
                loader.load_state_dict(state)
            state = by_json(walk(loader, got, pipeline.epoch, ALL if i == len(legs) - 1 else calls, strike))
    assert same(got, uninterrupted(pipeline))


def shape(name: str, deadly: Any) -> Pipeline:
    if name == "position":
        return pipe(range(60), p.sample(p.shuffled()), p.map(deadly), p.filter(bool), p.map(drawn_globally))
    if name == "stream":
        return pipe(p.from_iterable(range(60)), p.map(deadly), p.map(drawn_globally), p.batch(3))
    return pipe(range(60), p.shard_by_worker(3), p.map(deadly), p.shuffle_buffer(4), p.map(drawn_globally))


@FEW
@given(
    st.sampled_from(["position", "stream", "shards"]),
    st.lists(st.integers(0, 59), min_size=1, max_size=4, unique=True),
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 3)), min_size=2, max_size=3),
)
def test_a_chain_of_cuts_among_deadly_elements_changes_nothing(
    name: str, at: list[int], legs: list[tuple[int, int]]
) -> None:
    got: Outputs = [[] for _ in range(EPOCHS)]
    state: State | None = None
    for i, (calls, workers) in enumerate(legs):
        with tempfile.TemporaryDirectory() as folder:
            deadly = shape(name, Kills(folder, tuple(at)))
            with execute(deadly, workers=workers, restarts=9, **FORK) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                state = by_json(walk(loader, got, 0, ALL if i == len(legs) - 1 else calls))
    assert same(got, uninterrupted(shape(name, untouched)))


# At any moment --------------------------------------------------------------------------------------------------------

LOADERS = [{"workers": 0}, {"workers": 2, **FORK}, {"workers": 2, "backend": "thread"}]
every_loader = pytest.mark.parametrize("way", LOADERS, ids=["serial", "fork", "thread"])


def shuffled() -> Pipeline:
    return pipe(range(20), p.sample(p.shuffled()), p.map(jittered), p.batch(3))


def stream() -> Pipeline:
    return pipe(p.from_iterable(range(20)), p.shuffle_buffer(4), p.map(jittered), p.filter(bool))


def shards() -> Pipeline:
    return pipe(range(20), p.shard_by_worker(3), p.map(jittered), p.shuffle_buffer(2))


SHAPES: dict[str, Callable[[], Pipeline]] = {"position": shuffled, "stream": stream, "shards": shards}
every_shape = pytest.mark.parametrize("name", SHAPES)


def resumed(state: State, pipeline: Pipeline, **way: Any) -> Loader:
    loader = execute(pipeline, **way)
    loader.load_state_dict(by_json(state))
    return loader


@every_loader
@every_shape
def test_a_state_before_the_first_output_is_the_whole_epoch(way: dict[str, Any], name: str) -> None:
    pipeline = SHAPES[name]()
    with execute(pipeline, epoch=4, **way) as loader:
        untouched_state = loader.state_dict()
        running = iter(loader)
        assert loader.state_dict() == untouched_state
        del running
        assert loader.state_dict() == untouched_state
    with resumed(untouched_state, pipeline, **way) as loader:
        assert (loader.epoch, list(loader)) == (4, list(pipeline.at_epoch(4)))


@every_loader
@every_shape
def test_a_state_after_the_end_is_the_next_epoch(way: dict[str, Any], name: str) -> None:
    pipeline = SHAPES[name]()
    with execute(pipeline, **way) as loader:
        list(loader)
        state = loader.state_dict()
        assert (state["epoch"], state["outputs"]) == (1, 0)
    with resumed(state, pipeline, **way) as loader:
        assert loader.epoch == 1
        assert list(loader) == list(pipeline.at_epoch(1))


@every_loader
@every_shape
def test_a_state_at_the_last_output_leaves_an_empty_rest_and_then_the_next_epoch(
    way: dict[str, Any], name: str
) -> None:
    pipeline = SHAPES[name]()
    with execute(pipeline, **way) as loader:
        running = iter(loader)
        for _ in list(pipeline):
            next(running)
        state = loader.state_dict()
    with resumed(state, pipeline, **way) as loader:
        assert list(loader) == []
        assert list(loader) == list(pipeline.at_epoch(1))


@every_loader
@every_shape
def test_a_state_after_a_break_is_where_it_broke(way: dict[str, Any], name: str) -> None:
    pipeline = SHAPES[name]()
    with execute(pipeline, **way) as loader:
        for k, _ in enumerate(loader, 1):
            if k == 4:
                break
        state = loader.state_dict()
        assert loader.epoch == 1
        assert list(loader) == list(pipeline.at_epoch(1))
        loader.load_state_dict(state)
        assert loader.epoch == 0
        assert list(loader) == list(pipeline)[4:]


@every_loader
def test_a_state_after_an_exception_points_at_the_failing_output(way: dict[str, Any]) -> None:
    def made(at: Any) -> list[Pipeline]:
        return [
            pipe(range(20), p.sample(p.shuffled()), p.map(FailsAt(at)), p.map(jittered)),
            pipe(p.from_iterable(range(20)), p.map(FailsAt(at)), p.batch(2), p.map(jittered)),
            pipe(range(20), p.shard_by_worker(3), p.map(FailsAt(at)), p.map(jittered)),
        ]

    for failing, mended in zip(made(13), made(None), strict=True):
        got: list[Any] = []
        with execute(failing, **way) as loader:
            with pytest.raises(RuntimeError, match="plain"):
                got.extend(loader)
            state = loader.state_dict()
            assert state["outputs"] == len(got)
            loader.load_state_dict(state)
            with pytest.raises(RuntimeError, match="plain"):
                next(iter(loader))
        with resumed(state, mended, **way) as loader:
            assert [*got, *loader] == list(mended)


@every_loader
@every_shape
def test_a_resumed_loader_has_states_like_any_other(way: dict[str, Any], name: str) -> None:
    pipeline = SHAPES[name]()
    whole, got = list(pipeline), []
    state = execute(pipeline).state_dict()
    for k in range(len(whole)):
        with resumed(state, pipeline, **way) as loader:
            assert loader.state_dict() == state
            got.append(next(iter(loader)))
            state = loader.state_dict()
            assert state["outputs"] == k + 1
    assert got == whole


@every_loader
@every_shape
def test_the_seed_and_the_epoch_of_the_state_win(way: dict[str, Any], name: str) -> None:
    pipeline = SHAPES[name]()
    with execute(pipeline, seed=11, epoch=7, **way) as loader:
        first = next(iter(loader))
        state = loader.state_dict()
    with execute(pipeline, seed=1, epoch=1, **way) as loader:
        assert next(iter(loader)) != first
        loader.load_state_dict(state)
        assert (loader.seed, loader.epoch) == (11, 7)
        assert [first, *loader] == list(pipeline.seeded(11).at_epoch(7))
        assert list(loader) == list(pipeline.seeded(11).at_epoch(8))


@every_loader
@every_shape
def test_set_epoch_begins_that_epoch_whatever_was_loaded(way: dict[str, Any], name: str) -> None:
    pipeline = SHAPES[name]()
    with execute(pipeline, **way) as loader:
        next(iter(loader))
        state = loader.state_dict()
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert loader.state_dict()["outputs"] == 0
        assert list(loader) == list(pipeline)
        loader.set_epoch(6)
        assert loader.state_dict()["epoch"] == 6
        assert list(loader) == list(pipeline.at_epoch(6))
        assert loader.state_dict()["epoch"] == 7


def test_a_state_of_a_newer_iteration_is_not_that_of_an_older_one() -> None:
    with execute(shuffled()) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        next(newer)
        next(newer)
        with pytest.raises(RuntimeError, match="newer"):
            next(older)
        state = loader.state_dict()
        assert (state["epoch"], state["outputs"]) == (1, 2)


def test_a_closed_loader_still_has_its_state() -> None:
    with execute(shuffled(), workers=1, **FORK) as loader:
        first = next(iter(loader))
    with resumed(loader.state_dict(), shuffled()) as again:
        assert [first, *again] == list(shuffled())


def test_a_slice_of_a_loader_has_states() -> None:
    whole = execute(shuffled(), seed=3, epoch=2)
    part = whole[2:5]
    assert list(part) == list(shuffled().seeded(3).at_epoch(2))[2:5]
    running = iter(execute(shuffled(), seed=3, epoch=2)[2:5])
    part = whole[2:5]
    first = next(iter(part))
    assert first == next(running)
    again = whole[2:5]
    again.load_state_dict(part.state_dict())
    assert list(again) == list(running)


@pytest.mark.parametrize("seed", range(3))
def test_a_resume_draws_nothing_from_the_callers_generators(seed: int) -> None:
    pipeline = pipe(range(20), p.map(drawn_globally)).seeded(seed)
    with execute(pipeline) as loader:
        list(itertools.islice(loader, 7))
        before = random.getstate(), np.random.get_state(legacy=False)
        with resumed(loader.state_dict(), pipeline, workers=1, **FORK) as again:
            assert list(again) == list(pipeline)[7:]
        assert same([random.getstate(), np.random.get_state(legacy=False)], list(before))


# What is read ---------------------------------------------------------------------------------------------------------


class Recording:
    """A data set that remembers what was asked of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> int:
        self.asked.append(i)
        return i


def recorded(stages: Iterable[Any]) -> tuple[Recording, Pipeline]:
    dataset = Recording(40)
    return dataset, pipe(dataset, *stages)


RANDOM_ACCESS: dict[str, list[Any]] = {
    "plain": [],
    "map": [p.map(doubled)],
    "batch": [p.map(doubled), p.batch(4)],
    "collate": [p.batch(4), p.collate(to="numpy")],
    "shuffled": [p.sample(p.shuffled()), p.map(doubled), p.batch(4)],
    "window": [p.shuffle_buffer(8), p.batch(4)],
    "slice": [p.skip(3), p.take(30), p.batch(3)],
    "repeat": [p.sample(p.shuffled()), p.repeat(2), p.batch(7)],
    "rank": [p.shard_by_rank(1, 2), p.batch(3)],
}


@pytest.mark.parametrize("name", RANDOM_ACCESS)
def test_with_random_access_nothing_is_read_that_was_received(name: str) -> None:
    stages = RANDOM_ACCESS[name]
    n = len(pipe(range(40), *stages))
    for cut in range(n):
        dataset, pipeline = recorded(stages)
        with execute(pipeline) as loader:
            list(itertools.islice(loader, cut))
            state = loader.state_dict()
        alone, reference = recorded(stages)
        reference[cut]
        dataset, pipeline = recorded(stages)
        with resumed(state, pipeline) as loader:
            next(iter(loader))
        assert dataset.asked == alone.asked, f"cut at {cut}"


def test_a_slice_reads_nothing_that_it_leaves_out() -> None:
    for stages in ([p.map(doubled)], [p.map(doubled), p.batch(4)], [p.sample(p.shuffled())]):
        dataset, pipeline = recorded(stages)
        expected = list(pipe(range(40), *stages))[5:]
        loader = execute(pipeline)
        assert list(loader[5:]) == expected
        assert len(dataset.asked) == sum(np.size(x) for x in expected)


class Numbers:
    """A stream that can be asked where it is, and put there: as torchdata's iterators can."""

    def __init__(self, drawn: list[int]) -> None:
        self.drawn, self.at = drawn, 0

    def __iter__(self) -> Iterator[int]:
        return NumbersIterator(self.drawn)


class NumbersIterator:
    def __init__(self, drawn: list[int]) -> None:
        self.drawn, self.at = drawn, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == 30:
            raise StopIteration
        self.at += 1
        self.drawn.append(self.at - 1)
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("stages", [[], [p.map(doubled)], [p.batch(3)], [p.shuffle_buffer(4), p.map(doubled)]], ids=str)
def test_an_iterator_that_can_seek_is_seeked(stages: list[Any]) -> None:
    whole = list(pipe(p.from_iterable(range(30)), *stages))
    for cut in range(len(whole) + 1):
        with execute(pipe(p.from_iterable(Numbers([])), *stages)) as loader:
            got = list(itertools.islice(loader, cut)) if cut else []
            state = loader.state_dict()
        drawn: list[int] = []
        with resumed(state, pipe(p.from_iterable(Numbers(drawn)), *stages)) as loader:
            got += list(loader)
        assert got == whole
        received = 3 * cut if stages and isinstance(stages[0], p.batch) else cut
        assert len(drawn) <= 30 - received + 8, f"cut at {cut}: drew {drawn}"


def replays_told(pipeline: Pipeline, cut: int, **way: Any) -> list[str]:
    """Return what a resume warns of."""
    with execute(pipeline, **way) as loader:
        list(itertools.islice(loader, cut))
        state = loader.state_dict()
    with warnings.catch_warnings(record=True) as caught, resumed(state, pipeline, **way) as loader:
        warnings.simplefilter("always")
        list(loader)
        list(loader)
    assert all(w.category is UserWarning for w in caught)
    return [str(w.message) for w in caught]


@every_loader
def test_a_replay_is_told_once_with_the_number_of_elements(way: dict[str, Any]) -> None:
    told = replays_told(pipe(p.from_iterable(range(20)), p.map(doubled)), 5, **way)
    assert len(told) == 1
    assert "resuming replays and discards" in told[0]
    assert "from_iterable(" in told[0]
    number = int(told[0].split("discards ")[1].split()[0])
    assert number in (4, 5)


@every_loader
def test_where_nothing_is_replayed_nothing_is_told(way: dict[str, Any]) -> None:
    assert replays_told(pipe(range(20), p.sample(p.shuffled()), p.map(doubled), p.batch(3)), 3, **way) == []
    assert replays_told(pipe(range(20), p.shard_by_worker(2), p.map(doubled)), 3, **way) == []


def test_a_state_before_the_first_output_replays_nothing() -> None:
    assert replays_told(pipe(p.from_iterable(range(20)), p.map(doubled)), 0) == []


# What a state is ------------------------------------------------------------------------------------------------------


@every_loader
@every_shape
def test_a_state_counts_what_was_received_and_not_what_was_fetched(way: dict[str, Any], name: str) -> None:
    pipeline = SHAPES[name]()
    whole = list(pipeline)
    with execute(pipeline, **{"prefetch": 4} | way) as loader:
        assert loader.state_dict()["outputs"] == 0
        for k, _ in enumerate(loader, 1):
            assert loader.state_dict()["outputs"] == k
            if k % 3 == 0:
                with resumed(loader.state_dict(), pipeline) as again:
                    assert list(again) == whole[k:]


@given(pipelines(), st.integers(0, 12))
def test_a_state_is_small_json_and_saves_equal_when_loaded(pipeline: Pipeline, cut: int) -> None:
    with execute(pipeline) as loader:
        list(itertools.islice(loader, cut))
        state = loader.state_dict()
    assert len(json.dumps(state)) < 2048
    assert by_json(state) == state
    with resumed(state, pipeline) as again:
        assert again.state_dict() == state
        assert loader.state_dict() == state, "a loader's state is a value of its own"


@pytest.mark.parametrize(
    "pipeline",
    [
        pipe(list(range(10**5)), p.sample(p.shuffled()), p.batch(64)),
        pipe(tuple(range(10**5)), p.batch(64)),
        pipe("x" * 10**5, p.batch(64)),
        pipe(np.arange(10**5), p.sample(list(range(10**4))), p.batch(64)),
        pipe(range(10**5), p.sample(tuple(range(10**4))), p.batch(64)),
        pipe(range(10**5), p.sample(p.subset(range(10**4))), p.shard_by_worker(8), p.shuffle_buffer(1000)),
        pipe(p.from_iterable(range(10**5)), p.shuffle_buffer(5000), p.map(doubled), p.batch(64)),
    ],
    ids=["list", "tuple", "text", "indices", "tuple of indices", "shards", "stream"],
)
def test_a_state_is_small_however_much_data_there_is(pipeline: Pipeline) -> None:
    with execute(pipeline) as loader:
        list(itertools.islice(loader, 20))
        assert len(json.dumps(loader.state_dict())) < 2048


def test_changing_a_returned_state_changes_nothing() -> None:
    with execute(shards()) as loader:
        list(itertools.islice(loader, 5))
        state = loader.state_dict()
        kept = by_json(state)
        with resumed(state, shards()) as again:
            state["fingerprint"].clear()
            if isinstance(state["cursor"], list):
                state["cursor"].clear()
            assert loader.state_dict() == kept
            assert list(again) == list(shards())[5:]


# Bad input ------------------------------------------------------------------------------------------------------------


def state_of(pipeline: Pipeline, cut: int = 2) -> State:
    with execute(pipeline) as loader:
        list(itertools.islice(loader, cut))
        return loader.state_dict()


def other(x: Any) -> Any:
    return x


BASE = pipe(range(20), p.sample(p.shuffled()), p.map(doubled), p.batch(4))
OTHERS: dict[str, tuple[Pipeline, str]] = {
    "source": (pipe(range(21), *BASE.stages), "the source"),
    "kind of source": (pipe(list(range(20)), *BASE.stages), "the source"),
    "order": (pipe(range(20), p.sample(p.sequential()), *BASE.stages[1:]), "stage 1"),
    "function": (pipe(range(20), BASE.stages[0], p.map(other), p.batch(4)), "stage 2"),
    "scalar": (pipe(range(20), *BASE.stages[:2], p.batch(5)), "stage 3"),
    "flag": (pipe(range(20), *BASE.stages[:2], p.batch(4, drop_last=True)), "stage 3"),
    "one more": (pipe(BASE, p.take(3)), "stage 4"),
    "one less": (pipe(range(20), *BASE.stages[:2]), "stage 3"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_pipeline_names_what_differs(name: str) -> None:
    pipeline, words = OTHERS[name]
    with pytest.raises(ValueError, match=words):
        execute(pipeline).load_state_dict(state_of(BASE))
    with pytest.raises(ValueError, match=words):
        execute(BASE).load_state_dict(state_of(pipeline))


def test_a_state_belongs_to_an_equal_pipeline_made_anew() -> None:
    again = pipe(range(20), p.sample(p.shuffled()), p.map(doubled), p.batch(4))
    assert list(resumed(state_of(BASE), again)) == list(BASE)[2:]


def test_a_state_of_another_version_says_so() -> None:
    state = state_of(BASE)
    for version in (0, state["version"] + 1, "x", None):
        with pytest.raises(ValueError, match="version"):
            execute(BASE).load_state_dict(state | {"version": version})


@pytest.mark.parametrize("key", ["version", "seed", "epoch", "cursor", "fingerprint", "outputs"])
def test_a_truncated_state_says_what_is_missing(key: str) -> None:
    state = state_of(BASE)
    del state[key]
    with pytest.raises(ValueError, match=key):
        execute(BASE).load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], "{}", 3, {}, {"version": 1}], ids=repr)
def test_what_is_no_state_says_so(state: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="state"):
        execute(BASE).load_state_dict(state)


CORRUPT: list[dict[str, Any]] = [
    {"seed": "x"},
    {"seed": 1.5},
    {"seed": None},
    {"epoch": -1},
    {"epoch": "x"},
    {"epoch": None},
    {"outputs": -1},
    {"outputs": "x"},
    {"cursor": "x"},
    {"cursor": 5},
    {"cursor": {}},
    {"cursor": ["x", 1]},
    {"cursor": [1]},
    {"cursor": [1, "x"]},
    {"cursor": [-3, 1]},
    {"cursor": [1, 2, 3, 4, 5]},
    {"fingerprint": None},
    {"fingerprint": 3},
    {"fingerprint": []},
    {"fingerprint": {}},
]


@pytest.mark.parametrize("pipeline", [BASE, stream(), shards()], ids=["position", "stream", "shards"])
@pytest.mark.parametrize("wrong", CORRUPT, ids=str)
def test_a_corrupt_state_is_an_error_that_says_state(pipeline: Pipeline, wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"state|`seed`|`epoch`|`outputs`|fingerprint|cursor"):
        list(resumed(state_of(pipeline) | wrong, pipeline))


def test_a_refused_state_leaves_the_loader_as_it_was() -> None:
    with execute(BASE, seed=3) as loader:
        list(itertools.islice(loader, 2))
        before = loader.state_dict()
        for wrong in CORRUPT[:8]:
            with pytest.raises((TypeError, ValueError)):
                loader.load_state_dict(before | {"seed": 8} | wrong)
        assert loader.state_dict() == before
        assert loader.seed == 3


@every_loader
def test_a_state_cannot_be_loaded_while_an_iteration_is_running(way: dict[str, Any]) -> None:
    state = state_of(shuffled())
    with execute(shuffled(), **way) as loader:
        running = iter(loader)
        first = next(running)
        with pytest.raises(RuntimeError, match="running"):
            loader.load_state_dict(state)
        assert [first, *running] == list(shuffled())
        loader.load_state_dict(state)
        assert list(loader) == list(shuffled())[2:]


def test_a_state_loaded_between_iter_and_next_is_not_lost() -> None:
    state = state_of(shuffled())
    with execute(shuffled()) as loader:
        running = iter(loader)
        try:
            loader.load_state_dict(state)
        except RuntimeError as error:
            assert "running" in str(error)  # noqa: PT017
        else:
            with pytest.raises(RuntimeError):  # the iterator begun before is no longer the loader's
                next(running)
            assert list(loader) == list(shuffled())[2:]


def test_after_every_iterator_has_ended_a_state_can_be_loaded() -> None:
    state = state_of(shuffled())
    with execute(shuffled()) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        del newer
        del older
        loader.load_state_dict(state)
        assert list(loader) == list(shuffled())[2:]


def test_a_one_shot_iterator_cannot_be_resumed() -> None:
    def made() -> list[Pipeline]:
        return [
            pipe(p.from_iterable(iter(range(9))), p.map(doubled)),
            pipe(p.concat(p.from_iterable(iter(range(9))), [1]), p.map(doubled)),
            pipe(range(20), p.sample(iter(range(9))), p.map(doubled)),
        ]

    for ended, fresh in zip(made(), made(), strict=True):
        state = state_of(ended)
        with pytest.raises(ValueError, match=r"one-shot|replayed"):
            execute(fresh).load_state_dict(state)


def test_a_one_shot_iterator_can_begin_from_a_state_that_received_nothing() -> None:
    state = state_of(pipe(p.from_iterable(iter(range(9))), p.map(doubled)), 0)
    assert list(resumed(state, pipe(p.from_iterable(iter(range(9))), p.map(doubled)))) == [2 * i for i in range(9)]


def test_without_order_there_is_no_state() -> None:
    with execute(BASE, workers=1, ordered=False, **FORK) as loader:
        with pytest.raises(RuntimeError, match="ordered"):
            loader.state_dict()
        with pytest.raises(RuntimeError, match="ordered"):
            loader.load_state_dict(state_of(BASE))


# Ranks ----------------------------------------------------------------------------------------------------------------

WORLDS = [1, 2, 4]
GLOBAL_BATCH = 8


def ranked(kind: str, n: int, rank: int, world_size: int, uneven: str) -> Pipeline:
    source: Any = p.from_iterable(range(n)) if kind == "stream" else range(n)
    order = [p.shuffle_buffer(5)] if kind == "stream" else [p.sample(p.shuffled())]
    share = p.shard_by_rank(rank, world_size, uneven=uneven)
    return pipe(source, *order, share, p.map(jittered), p.batch(GLOBAL_BATCH // world_size)).seeded(3)


def interleaved(steps: list[list[Any]]) -> list[Any]:
    """The global order of what ranks got in one step: element j of rank r is the (j * ranks + r)-th."""
    missing = object()
    rounds = itertools.zip_longest(*steps, fillvalue=missing)
    return [x for one in rounds for x in one if x is not missing]


def ranks_step(iterators: list[Iterator[Any]]) -> list[Any]:
    return interleaved([next(it, []) for it in iterators])


@given(
    st.sampled_from(["position", "stream"]),
    st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(0, 7), st.integers(0, 3)), min_size=2, max_size=4),
    st.sampled_from([("keep", 61), ("keep", 64), ("drop", 64), ("pad", 64)]),
)
def test_a_job_goes_on_with_any_number_of_ranks(
    kind: str, legs: list[tuple[int, int, int]], end: tuple[str, int]
) -> None:
    uneven, n = end
    whole = uninterrupted(ranked(kind, n, 0, 1, uneven), 2)
    got: list[list[Any]] = [[], []]
    state: State | None = None
    for i, (world_size, calls, saver) in enumerate([*legs, (1, 0, 0)]):
        steps = calls
        loaders = [execute(ranked(kind, n, rank, world_size, uneven)) for rank in range(world_size)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(by_json(state))
        while (epoch := loaders[0].epoch) < 2:
            iterators = [iter(loader) for loader in loaders]
            at_end = False
            while not at_end and (steps or i == len(legs)):
                steps -= 1
                found = ranks_step(iterators)
                got[epoch].extend(found)
                at_end = not found
            if not at_end:
                break
        state = loaders[saver % world_size].state_dict()
    assert got == [[x for one in epoch for x in one] for epoch in whole]


@pytest.mark.parametrize("way", LOADERS[:2], ids=["serial", "fork"])
@pytest.mark.parametrize("worlds", list(itertools.product(WORLDS, WORLDS)), ids=str)
def test_ranks_with_workers_go_on_with_other_ranks(worlds: tuple[int, int], way: dict[str, Any]) -> None:
    before, after = worlds
    whole = [x for batch in ranked("position", 64, 0, 1, "drop") for x in batch]
    got: list[Any] = []
    loaders = [execute(ranked("position", 64, r, before, "drop"), **way) for r in range(before)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(3):
        got += ranks_step(iterators)
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    assert all(state == states[0] for state in states)
    loaders = [resumed(states[-1], ranked("position", 64, r, after, "drop"), **way) for r in range(after)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(5):
        got += ranks_step(iterators)
    assert got == whole
    assert ranks_step(iterators) == []
    for loader in loaders:
        loader.close()


def test_another_global_batch_is_another_pipeline() -> None:
    state = state_of(ranked("position", 64, 0, 2, "drop"))
    share = p.shard_by_rank(0, 4, uneven="drop")
    changed = pipe(range(64), p.sample(p.shuffled()), share, p.map(jittered), p.batch(4))
    with pytest.raises(ValueError, match="batch"):
        execute(changed).load_state_dict(state)


def test_without_a_batch_another_number_of_ranks_is_another_pipeline() -> None:
    def made(rank: int, world_size: int) -> Pipeline:
        return pipe(range(64), p.shard_by_rank(rank, world_size), p.map(jittered))

    with pytest.raises(ValueError, match="world_size"):
        execute(made(0, 4)).load_state_dict(state_of(made(0, 2)))


@pytest.mark.parametrize("kind", ["position", "stream", "filtered", "shards"])
def test_the_state_of_any_rank_serves_all_ranks_or_says_that_it_does_not(kind: str) -> None:
    def made(rank: int) -> Pipeline:
        if kind in ("position", "stream"):
            return ranked(kind, 64, rank, 2, "keep")
        if kind == "filtered":
            return pipe(range(64), p.shard_by_rank(rank, 2), p.filter(most), p.map(jittered))
        return pipe(range(64), p.shard_by_rank(rank, 2), p.shard_by_worker(2), p.map(jittered))

    for saver, loading in itertools.product(range(2), range(2)):
        state = state_of(made(saver), 5)
        try:
            rest = list(resumed(state, made(loading)))
        except ValueError:
            assert saver != loading, "a rank cannot load its own state"
            continue
        assert rest == list(made(loading))[5:], f"saved on rank {saver}, loaded on rank {loading}"


# Law 5 ----------------------------------------------------------------------------------------------------------------


def check_partition(parts: list[list[Any]], n: int, uneven: str) -> None:
    world_size, sizes, seen = len(parts), [len(part) for part in parts], sorted(x for part in parts for x in part)
    full = n // world_size * world_size
    if uneven == "keep":
        assert seen == list(range(n))
        assert max(sizes) - min(sizes) <= 1
    elif uneven == "drop":
        assert seen == list(range(full))
        assert set(sizes) == {n // world_size}
    else:
        assert set(seen) == set(range(n))
        assert set(sizes) == {-(-n // world_size)}
        repeated = seen.copy()
        for x in range(n):
            repeated.remove(x)
        assert all(x >= full for x in repeated), "only elements of the last round are repeated"


@settings(max_examples=settings().max_examples * 2)
@given(
    st.integers(0, 40),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from(ENDS),
    st.booleans(),
    st.sampled_from([0, 0, 0, 2]),
)
def test_ranks_and_shards_partition_the_source(
    n: int, world_size: int, shards: int, uneven: str, streamed: bool, workers: int
) -> None:
    parts = []
    for rank in range(world_size):
        source: Any = p.from_iterable(range(n)) if streamed else range(n)
        inside = [p.shard_by_worker(shards), p.map(untouched)] if shards else [p.map(untouched)]
        pipeline = pipe(source, p.shard_by_rank(rank, world_size, uneven=uneven), *inside)
        with execute(pipeline, workers=workers, **FORK) as loader:
            parts.append(list(loader))
    check_partition(parts, n, uneven)


@given(st.integers(0, 40), st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_a_mask_marks_the_elements_that_padding_repeats(n: int, world_size: int, streamed: bool, batch: int) -> None:
    parts: list[list[tuple[int, bool]]] = []
    for rank in range(world_size):
        source: Any = p.from_iterable(range(n)) if streamed else range(n)
        padded = pipe(source, p.shard_by_rank(rank, world_size, uneven="pad", mask=True))
        p.testing.check_pipeline(padded)
        if batch:
            padded = pipe(padded, p.batch(batch), p.unbatch())
        parts.append(list(padded))
    check_partition([[x for x, _ in part] for part in parts], n, "pad")
    assert sorted(x for part in parts for x, valid in part if valid) == list(range(n))
    assert all(isinstance(valid, bool) for part in parts for _, valid in part)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["drop", "pad"]), st.integers(1, 5))
def test_every_rank_has_the_same_number_of_steps(n: int, world_size: int, shards: int, uneven: str, size: int) -> None:
    def steps(rank: int) -> int:
        share = p.shard_by_rank(rank, world_size, uneven=uneven)
        return len(list(pipe(p.from_iterable(range(n)), share, p.shard_by_worker(shards), p.batch(size))))

    assert len({steps(rank) for rank in range(world_size)}) == 1


def test_ranks_draw_what_the_whole_draws() -> None:
    whole = dict(pipe(range(40), p.map(jittered)))
    for rank in range(4):
        assert all(draw == whole[x] for x, draw in pipe(range(40), p.shard_by_rank(rank, 4), p.map(jittered)))
