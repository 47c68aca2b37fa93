"""A loader's workers and their ends, in the words of torch and `multiprocessing`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import weakref
from typing import Any

from pipes.errors import WorkerError, WorkerTimeoutError
from pipes.execution.launch import METHODS, Child
from pipes.execution.waiting import readable


class Worker:
    """A worker in the words of `multiprocessing.Process`."""

    def __init__(self, child: Child) -> None:
        self._child, self.pid, self._pidfd = child, child.pid, os.dup(child.pidfd)
        weakref.finalize(self, os.close, self._pidfd).atexit = False

    def is_alive(self) -> bool:
        """Tell whether it lives."""
        return not readable([self._pidfd], 0)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        readable([self._pidfd], timeout)

    def terminate(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    @property
    def exitcode(self) -> int | None:
        """How it ended, negative for a signal; None while it lives."""
        return None if self.is_alive() else self._child.status


def in_torchs_words(error: BaseException, timeout: float) -> BaseException:
    """Say what torch says when a worker is stuck or ends, and why."""
    if isinstance(error, WorkerTimeoutError):
        return WorkerTimeoutError(f"DataLoader timed out after {timeout} seconds: {error}")
    if not isinstance(error, WorkerError) or error.status is None:
        return error
    name = f"DataLoader worker (pid {error.pid})"
    died = f"is killed by signal: {signal.strsignal(-error.status)}" if error.status < 0 else "exited unexpectedly"
    return WorkerError(f"{name} {died}: {error}")


def start_method(context: Any) -> str:
    """Return the method of a context, by default that of `multiprocessing`; a foreign one is a clean interpreter."""
    if context is not None:
        name = context.get_start_method()
    else:
        name = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return name if name in METHODS else "spawn"
