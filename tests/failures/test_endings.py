"""However a run ends: no process, descriptor or shared memory is left, and nothing is said but what a user caused."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import run_script, script
from tasks import Blocks, Reads, big, doubled

import pipes as p
from pipes import WorkerTimeoutError, execute, pipe

METHODS = ("fork", "forkserver", "spawn")
every_process = pytest.mark.parametrize("method", METHODS)

LOADER = """
def work(i):
    return np.full(40_000, i)

def endless():
    return p.pipe(range(10), p.repeat(), p.map(work))

def few():
    return p.pipe(range(10), p.map(work))

def loader(pipeline=None, workers=2):
    return p.execute(endless() if pipeline is None else pipeline, workers=workers, start_method=METHOD, prefetch=4)
"""

WITHIN = {
    "break": """
made = loader()
for x in made:
    tell(*descendants())
    break
""",
    "exhaustion": """
made = loader(few())
for i, x in enumerate(made):
    if not i:
        tell(*descendants())
""",
    "deletion": """
made = loader()
running = iter(made)
next(running)
tell(*descendants())
del made, running
""",
    "deletion before the first output": """
made = loader()
running = iter(made)
tell(*descendants())
del made, running
""",
    "close": """
made = loader()
running = iter(made)
next(running)
tell(*descendants())
made.close()
""",
    "with": """
with loader() as made:
    running = iter(made)
    next(running)
    tell(*descendants())
""",
    "exit": """
made = loader()
running = iter(made)
held = [next(running) for _ in range(20)]
tell(*descendants())
sys.exit()
""",
    "exit of the main thread": """
import threading
def run():
    global made, running
    made = loader()
    running = iter(made)
    next(running)
thread = threading.Thread(target=run)
thread.start()
thread.join()
tell(*descendants())
""",
    "serial executors within": """
made = [loader() for _ in range(3)]
runs = [iter(m) for m in made]
for run in runs:
    next(run)
tell(*descendants())
""",
}


SLOW_TO_START = ("break", "exit", "close")


@pytest.mark.parametrize(
    ("method", "ending"), [(m, e) for m in METHODS for e in WITHIN if m != "spawn" or e in SLOW_TO_START]
)
def test_an_ending_leaves_nothing_behind(method: str, ending: str) -> None:
    with script(LOADER + WITHIN[ending], method) as running:
        assert len(running.watch()) >= 2
        running.go_on()
        assert running.ended() == ("", "")
        assert running.process.returncode == 0


EXCEPTION = """
for x in loader():
    tell(*descendants())
    raise ZeroDivisionError("the user's")
"""


@every_process
def test_an_exception_in_the_loop_is_all_that_is_said(method: str) -> None:
    with script(LOADER + EXCEPTION, method) as running:
        running.watch()
        running.go_on()
        out, err = running.ended()
        assert running.process.returncode == 1
    assert out == ""
    assert err.count("Traceback") == 1
    assert err.endswith("ZeroDivisionError: the user's\n")
    assert err.count("\n") == 4, err


ENDS_OF_LOADERS = """
made = loader()
for x in made:
    break
direct = open(f"/proc/self/task/{os.getpid()}/children").read().split()
pids = [pid for pid in descendants() if (str(pid) in direct) == (METHOD != "forkserver")]
tell(*pids)
del made, x
tell("gone")
"""


@every_process
def test_a_loader_that_is_collected_ends_its_workers_while_the_process_goes_on(method: str) -> None:
    with script(LOADER + ENDS_OF_LOADERS, method) as running:
        assert len(running.watch()) == 2
        running.go_on()
        assert running.heard() == ["gone"]
        assert running.survivors() == []
        running.go_on()
        assert running.ended() == ("", "")


INTERRUPTED = {
    "while results come": """
made = loader()
for i, x in enumerate(made):
    if i == 3:
        tell(*descendants())
        print("looping", flush=True)
""",
    "while it waits": """
import threading
import tasks
made = loader(p.pipe(range(10), p.map(tasks.Blocks(5))))
running = iter(made)
next(running)
tell(*descendants())
print("looping", flush=True)
list(running)
""",
    "while the consumer works": """
import threading
with loader() as made:
    for x in made:
        tell(*descendants())
        print("looping", flush=True)
        threading.Event().wait()
""",
}


@pytest.mark.parametrize("moment", INTERRUPTED)
@every_process
def test_an_interrupt_is_one_keyboard_interrupt(moment: str, method: str) -> None:
    with script(LOADER + INTERRUPTED[moment], method) as running:
        running.watch()
        running.go_on()
        assert running.process.stdout is not None
        assert running.process.stdout.readline() == "looping\n"
        running.interrupt()
        out, err = running.ended()
        assert running.process.returncode == -signal.SIGINT
    assert out == ""
    assert err.count("Traceback") == 1, err
    assert err.count("KeyboardInterrupt") == 1, err
    assert err.strip().endswith("KeyboardInterrupt"), err


GOES_ON = """
made = loader(few())
try:
    for x in made:
        tell(*descendants())
        os.kill(os.getpid(), 2)
        signal_arrives = [i for i in range(10**6)]
except KeyboardInterrupt:
    pass
print([int(x[0]) for x in made])
"""


@every_process
def test_a_loader_goes_on_after_an_interrupt(method: str) -> None:
    with script(LOADER + GOES_ON, method) as running:
        running.watch()
        running.go_on()
        assert running.ended() == ("[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]\n", "")


KILLED = """
made = loader()
held = []
for x in made:
    held.append(x)
    if len(held) == 3:
        tell(*descendants())
    if len(held) > 3:
        held.pop()
"""

STUCK = """
import tasks
made = loader(p.pipe(range(10), p.map(tasks.Blocks(3))))
running = iter(made)
next(running)
tell(*descendants())
list(running)
"""

NESTED = """
import tasks
made = loader(p.pipe(range(10), p.map(tasks.nested_and_open)), workers=1)
running = iter(made)
next(running)
tell(*descendants())
list(running)
"""


@pytest.mark.parametrize("code", [KILLED, STUCK, NESTED], ids=["busy", "stuck", "nested"])
@every_process
def test_no_worker_outlives_a_killed_consumer(code: str, method: str) -> None:
    with script(LOADER + code, method) as running:
        assert len(running.watch()) >= 2
        running.process.kill()
        assert running.ended() == ("", "")


@every_process
def test_a_stuck_worker_ends_with_its_loader(method: str) -> None:
    code = STUCK.replace("list(running)", "made.close()")
    with script(LOADER + code, method) as running:
        assert len(running.watch()) >= 2
        running.go_on()
        assert running.ended() == ("", "")


@every_process
def test_nothing_is_said_when_every_warning_is_an_error(method: str, tmp_path: Path) -> None:
    code = """
    import subprocess
    inner = "import os, sys; sys.path[:] = {!r}; import numpy as np, pipes as p\\n".format(sys.path)
    inner += "METHOD = {!r}\\n".format(METHOD)
    inner += LOADER + "made = loader(); running = iter(made); next(running); other = loader(few()); list(other)"
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", inner], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
    """
    assert run_script(f"LOADER = {LOADER!r}\n" + dedented(code), folder=tmp_path, method=method) == ""


def dedented(code: str) -> str:
    import textwrap

    return textwrap.dedent(code)


BUFFERED = """
print("once", end=" ")
with loader(few()) as made:
    print(len(list(made)))
"""


@every_process
def test_what_the_caller_has_printed_is_printed_once(method: str, tmp_path: Path) -> None:
    assert run_script(LOADER + BUFFERED, folder=tmp_path, method=method) == "once 10\n"


LOUD = """
def work(i):
    print("from a worker", i)
    return i
with loader(p.pipe(range(3), p.map(work)), workers=1) as made:
    list(made)
"""


@every_process
def test_what_workers_print_is_printed(method: str, tmp_path: Path) -> None:
    out = run_script(LOADER + LOUD, folder=tmp_path, method=method)
    assert out == "".join(f"from a worker {i}\n" for i in range(3))


# Within a process -----------------------------------------------------------------------------------------------------


def held_by_this_process() -> tuple[list[str], int, list[str]]:
    """Descriptors, threads and children, without the fork server's."""
    gc.collect()
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one that lists the others
            continue
    children = [c for task in Path("/proc/self/task").glob("*/children") for c in task.read_text().split()]
    return sorted(name.partition(":")[0] for name in fds), threading.active_count(), sorted(children)


def warm_up(method: str) -> None:
    """Start the fork server, which may stay."""
    with execute(pipe([1], p.map(doubled)), workers=1, start_method=method) as loader:
        list(loader)


WAYS: list[dict[str, Any]] = [{"start_method": m} for m in METHODS] + [{"backend": "thread"}]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: next(iter(w.values())))
def test_many_epochs_and_loaders_hold_nothing(way: dict[str, Any]) -> None:
    warm_up(way.get("start_method", "fork"))
    before = held_by_this_process()
    with execute(pipe(range(12), p.map(big)), workers=2, **way) as loader:
        list(loader)
        running = held_by_this_process()
        for _ in range(50):
            for x in loader:
                assert x[0] >= 0
        del x
        assert held_by_this_process() == running
    assert held_by_this_process() == before
    for i in range(2 if way.get("start_method") == "spawn" else 20):
        loader = execute(pipe(range(12), p.map(big)), workers=2, **way)
        for _ in loader:
            break
        if i % 2:
            loader.close()
        del loader
    assert held_by_this_process() == before


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_results_outlive_everything_and_then_let_go(method: str) -> None:
    warm_up(method)
    before = held_by_this_process()
    with execute(pipe(range(12), p.map(big)), workers=2, start_method=method) as loader:
        held = list(loader)
    del loader
    assert all((x == i).all() for i, x in enumerate(held))
    del held
    assert held_by_this_process() == before


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_shared_array_lets_go_of_its_descriptor(method: str) -> None:
    warm_up(method)
    before = held_by_this_process()
    array = p.share(np.arange(10_000))
    with execute(pipe(range(5), p.map(Reads(array))), workers=1, start_method=method) as loader:
        assert list(loader) == list(range(5))
    del array, loader
    assert held_by_this_process() == before


@pytest.mark.parametrize("way", [*WAYS[:2], WAYS[3]], ids=lambda w: next(iter(w.values())))
def test_failures_hold_nothing(way: dict[str, Any]) -> None:
    def fails(x: int) -> Any:
        if x == 5:
            raise ValueError(x)
        return big(x)

    warm_up(way.get("start_method", "fork"))
    before = held_by_this_process()
    for _ in range(5):
        with execute(pipe(range(12), p.map(fails)), workers=2, **way) as loader, pytest.raises(ValueError, match="5"):
            list(loader)
    del loader
    assert held_by_this_process() == before


def test_a_part_that_cannot_be_serialised_holds_nothing() -> None:
    warm_up("forkserver")
    before = held_by_this_process()
    lock = threading.Lock()
    for _ in range(3):
        with execute(pipe(range(3), p.map(lambda _: lock)), workers=1) as loader, pytest.raises(p.WorkerError):
            list(loader)
    del loader
    assert held_by_this_process() == before


# Time limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda w: next(iter(w.values())))
def test_a_stuck_worker_is_named_with_its_position_and_stack(way: dict[str, Any]) -> None:
    if "backend" in way:
        way = {**way, "timeout": 0.5}
    pipeline = pipe(range(9), p.batch(1), p.map(stuck_at_three))
    got: list[Any] = []
    with execute(pipeline, workers=2, **{"timeout": 1.5, **way}) as loader:
        with pytest.raises(WorkerTimeoutError) as caught:
            got.extend(loader)
        assert got == [[0], [1], [2]]
        text = str(caught.value)
        assert "worker " in text
        assert "unit 3" in text
        assert "wait_for_ever" in text
        assert "timeout" in text
        release()


def stuck_at_three(batch: list[int]) -> list[int]:
    if batch == [3]:
        wait_for_ever()
    return batch


STUCK_THREADS = threading.Event()


def wait_for_ever() -> None:
    STUCK_THREADS.wait()


def release() -> None:
    """Let threads go on, which nobody can end."""
    STUCK_THREADS.set()
    STUCK_THREADS.clear()


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=lambda w: next(iter(w.values())))
def test_a_shard_that_is_stuck_is_named(way: dict[str, Any]) -> None:
    pipeline = pipe(range(9), p.shard_by_worker(2), p.batch(1), p.map(stuck_at_three))
    with execute(pipeline, workers=2, timeout=0.5, **way) as loader:
        with pytest.raises(WorkerTimeoutError, match=r"(?s)shard 1.*wait_for_ever"):
            list(loader)
        release()


def test_time_that_the_consumer_takes_is_not_the_workers() -> None:
    with execute(pipe(range(9), p.map(doubled)), workers=1, start_method="fork", timeout=0.2) as loader:
        outputs = []
        for x in loader:
            threading.Event().wait(0.05)
            outputs.append(x)
    assert outputs == [2 * i for i in range(9)]


def test_a_data_set_that_blocks_ends_with_the_loader() -> None:
    loader = execute(pipe(range(9), p.map(Blocks(3))), workers=2, start_method="fork")
    running = iter(loader)
    assert next(running) == 0
    loader.close()
    with pytest.raises(RuntimeError):
        next(running)
