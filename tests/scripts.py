"""Run scripts in processes of their own and watch what they leave behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent
LIMIT = 60.0
AFTERWARDS = 3.0

PREAMBLE = """
import os, sys
sys.path.insert(0, {tests!r})
import numpy as np
import pipes as p
from scripts import descendants, tell

METHOD = {method!r}
"""


def descendants() -> list[int]:
    """The processes below this one, from the kernel."""
    found, todo = [], [os.getpid()]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            pids = [int(x) for x in task.read_text().split()]
            found += pids
            todo += pids
    return found


def tell(*what: object) -> None:
    """Tell the test something, and wait for its word to go on."""
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in {"PYTHONWARNINGS", "PYTHONFAULTHANDLER"}}


def run_script(code: str, *, how: str = "file", folder: Path | None = None, method: str = "") -> str:
    """Return what a script prints, which must succeed and leave nothing on stderr."""
    text = PREAMBLE.format(tests=str(TESTS), method=method) + textwrap.dedent(code)
    arguments = ["-c", text] if how == "-c" else ["-"]
    if how == "file":
        assert folder is not None
        (folder / "script.py").write_text(text)
        arguments = [str(folder / "script.py")]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text if how == "-" else "",
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(),
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


class Script:
    """A script that runs while the test does something to it."""

    def __init__(self, code: str, method: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE.format(tests=str(TESTS), method=method) + textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        self.watched: dict[int, int] = {}

    def heard(self) -> list[object]:
        """Wait for what the script tells."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.ended()
        told: list[object] = json.loads(line)
        return told

    def watch(self) -> list[int]:
        """Hear of the script's processes, and keep hold of them."""
        pids = [int(str(pid)) for pid in self.heard()]
        self.watched = {os.pidfd_open(pid): pid for pid in pids}
        return pids

    def go_on(self) -> None:
        """Let the script go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def interrupt(self) -> None:
        """Press Ctrl-C: the signal goes to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self) -> tuple[str, str]:
        """Wait for the end; return what it printed since, and its errors."""
        return self.process.communicate(timeout=LIMIT)

    def survivors(self) -> list[int]:
        """The processes heard of that are alive three seconds later."""
        poll, left = select.poll(), dict(self.watched)
        for fd in left:
            poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + AFTERWARDS
        while left and (wait := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(wait * 1000):
                poll.unregister(fd)
                del left[fd]
        return list(left.values())

    def close(self) -> None:
        """End what is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        for fd in self.watched:
            os.close(fd)


@contextmanager
def script(code: str, method: str) -> Iterator[Script]:
    """Run a script for the time of a `with` block; it must leave nothing in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    running = Script(code, method)
    try:
        yield running
        assert running.survivors() == []
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        running.close()
