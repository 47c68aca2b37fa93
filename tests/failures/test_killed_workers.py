"""A worker may end at any moment, in any way: the sequence goes on unbroken, or the error names what kills workers."""

from __future__ import annotations

import os
import select
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import DiesAtStart, Kills, big, doubled, drawn_globally, dying, jittered, parent_of, pid_of, untouched

import pipes as p
from pipes import WorkerError, execute, pipe
from pipes.values import same

FEW = settings(max_examples=max(10, settings().max_examples // 4))
SIZE = 60
every_process = pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])


def shape(name: str, deadly: Any) -> p.Pipeline:
    """A pipeline of `SIZE` elements that passes `deadly` in a worker, one for each way to divide the work."""
    if name == "position":
        return pipe(range(SIZE), p.map(deadly), p.map(jittered), p.map(drawn_globally))
    if name == "batches":
        return pipe(range(SIZE), p.sample(p.shuffled()), p.map(deadly), p.map(drawn_globally), p.batch(4))
    if name == "filtered":
        return pipe(range(SIZE), p.map(deadly), p.filter(bool), p.flat_map(lambda x: [x, -x]), p.map(drawn_globally))
    if name == "stream":
        return pipe(p.from_iterable(range(SIZE)), p.map(deadly), p.map(drawn_globally), p.batch(3))
    if name == "shards":
        return pipe(range(SIZE), p.shard_by_worker(3), p.map(deadly), p.map(drawn_globally))
    if name == "one shard":
        return pipe(range(SIZE), p.shard_by_worker(1), p.map(deadly), p.map(jittered))
    assert name == "large"
    return pipe(range(SIZE), p.map(deadly), p.map(big))


SHAPES = ("position", "batches", "filtered", "stream", "shards", "one shard", "large")
METHODS = st.sampled_from(["fork", "fork", "fork", "forkserver"])


@FEW
@given(
    st.sampled_from(SHAPES),
    st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=4, unique=True),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    METHODS,
)
def test_a_worker_that_kills_itself_leaves_no_trace(
    name: str, at: list[int], times: int, workers: int, prefetch: int, method: str
) -> None:
    expected = shape(name, untouched)
    with tempfile.TemporaryDirectory() as folder:
        deadly = shape(name, Kills(folder, tuple(at), times=times))
        with execute(deadly, workers=workers, prefetch=prefetch, start_method=method, restarts=4 * times) as loader:
            assert same(list(loader), list(expected))
            assert len(os.listdir(folder)) == len(at) * times
            assert same(list(loader), list(expected.at_epoch(1)))


@pytest.mark.parametrize("name", SHAPES)
def test_without_order_nothing_is_lost_or_doubled(name: str, tmp_path: Path) -> None:
    deadly = shape(name, Kills(str(tmp_path), (0, 7, 31)))
    with execute(deadly, workers=2, start_method="fork", ordered=False) as loader:
        assert sorted(map(repr, loader)) == sorted(map(repr, shape(name, untouched)))


@contextmanager
def killing(pid: int) -> Iterator[int]:
    """Kill a process and wait until it is dead."""
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        assert select.select([fd], [], [], 10)[0]
        yield fd
    finally:
        os.close(fd)


def workers_of(children: set[int]) -> list[int]:
    return sorted(children_of_this_process() - children)


def children_of_this_process() -> set[int]:
    return {int(x) for task in Path("/proc/self/task").glob("*/children") for x in task.read_text().split()}


@FEW
@given(
    st.sampled_from(SHAPES),
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 2)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
)
def test_a_worker_killed_from_outside_leaves_no_trace(name: str, kills: list[tuple[int, int]], prefetch: int) -> None:
    pipeline = shape(name, untouched)
    before = children_of_this_process()
    moments: dict[int, list[int]] = {}
    for moment, which in kills:
        moments.setdefault(moment, []).append(which)
    got = []
    with execute(pipeline, workers=2, prefetch=prefetch, start_method="fork", restarts=9) as loader:
        running = iter(loader)
        for step in range(10 * SIZE):
            for which in moments.get(step, ()):
                if alive := workers_of(before):
                    with killing(alive[which % len(alive)]):
                        pass
            try:
                got.append(next(running))
            except StopIteration:
                break
        assert same(got, list(pipeline))
        assert same(list(loader), list(pipeline.at_epoch(1)))


@every_process
def test_workers_killed_between_epochs_are_replaced(method: str) -> None:
    with execute(pipe(range(40), p.map(pid_of)), workers=2, start_method=method) as loader:
        for _ in range(3):
            pids = set(loader)
            assert 1 <= len(pids) <= 2
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert not set(loader) & pids


def test_a_killed_fork_server_is_replaced() -> None:
    with execute(pipe(range(40), p.map(parent_of)), workers=2, start_method="forkserver") as loader:
        for _ in range(2):
            (server,) = {parent for _, parent in loader}
            assert server != os.getpid()
            with killing(server):
                pass
            pids = {pid for pid, _ in loader}
            assert pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            (new,) = {parent for _, parent in loader}
            assert new not in (server, os.getpid())


@pytest.mark.parametrize("how", ["segfault", "_exit", "exit", "term"])
@pytest.mark.parametrize(
    ("method", "name"),
    [(m, n) for m in ("fork", "forkserver", "spawn") for n in ("position", "stream", "shards")][:7],
)
def test_however_a_worker_ends_the_sequence_goes_on(how: str, method: str, name: str, tmp_path: Path) -> None:
    deadly = shape(name, Kills(str(tmp_path), (5, 50), how))
    with execute(deadly, workers=2, start_method=method) as loader:
        assert same(list(loader), list(shape(name, untouched)))
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("name", [n for n in SHAPES if n != "filtered"])
@pytest.mark.parametrize("restarts", [0, 2])
def test_what_always_kills_its_worker_is_named(name: str, restarts: int, tmp_path: Path) -> None:
    deadly = shape(name, Kills(str(tmp_path), (33,), times=100))
    serial = list(shape(name, untouched))
    got: list[Any] = []
    with (
        execute(deadly, workers=2, start_method="fork", restarts=restarts) as loader,
        pytest.raises(WorkerError, match="SIGKILL") as caught,
    ):
        got.extend(loader)
    assert same(got, serial[: len(got)])
    assert len(os.listdir(tmp_path)) == restarts + 1
    assert "unit" in str(caught.value) or "shard" in str(caught.value)


def test_what_precedes_the_deadly_output_is_delivered(tmp_path: Path) -> None:
    deadly = pipe(range(20), p.map(doubled), p.batch(1), p.map(Kills(str(tmp_path), ([14],), times=99)))  # type: ignore[arg-type]
    got: list[Any] = []
    with execute(deadly, workers=2, start_method="fork", restarts=1) as loader:
        with pytest.raises(WorkerError, match=r"\b7\b"):
            got.extend(loader)
        assert got == [[2 * i] for i in range(7)]


def test_deaths_are_counted_per_task(tmp_path: Path) -> None:
    deadly = shape("batches", Kills(str(tmp_path), tuple(range(0, SIZE, 5))))
    with execute(deadly, workers=2, start_method="fork", restarts=4) as loader:
        assert same(list(loader), list(shape("batches", untouched)))


@pytest.mark.parametrize("how", ["kill", "segfault"])
def test_a_death_while_large_results_are_held(how: str, tmp_path: Path) -> None:
    kept: list[np.ndarray[Any, Any]] = []
    with execute(
        shape("large", Kills(str(tmp_path), (3, 20, 59), how)), workers=2, prefetch=4, start_method="fork"
    ) as loader:
        for _ in range(2):
            kept += list(loader)
    assert all((x == i % SIZE).all() for i, x in enumerate(kept))


@every_process
def test_a_worker_that_dies_while_it_starts_is_replaced(method: str, tmp_path: Path) -> None:
    with execute(
        pipe(range(40), p.map(doubled)), workers=2, start_method=method, worker_init=DiesAtStart(str(tmp_path))
    ) as loader:
        assert list(loader) == [2 * i for i in range(40)]


@every_process
def test_workers_that_always_die_while_they_start_are_an_error(method: str) -> None:
    with execute(
        pipe(range(40), p.map(doubled)), workers=2, start_method=method, worker_init=dying, restarts=1
    ) as loader:
        for _ in range(2):
            with pytest.raises(WorkerError, match="exit code 7 while it started"):
                list(loader)


def test_a_death_in_a_task_of_an_abandoned_run_changes_nothing(tmp_path: Path) -> None:
    deadly = pipe(range(20), p.batch(1), p.map(Kills(str(tmp_path), ([1],), times=1)))  # type: ignore[arg-type]
    with execute(deadly, workers=1, start_method="fork", restarts=1, prefetch=2) as loader:
        for _ in loader:
            break
        loader.set_epoch(0)
        assert list(loader) == [[i] for i in range(20)]
