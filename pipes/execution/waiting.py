"""Wait for descriptors: `select` without its limit of 1024."""

from __future__ import annotations

import math
import select
from collections.abc import Iterable

MOST = (1 << 31) - 1


def milliseconds(timeout: float | None) -> int | None:
    """Return what `poll` takes: rounded up, so that a wait never ends before its time."""
    return None if timeout is None else math.ceil(min(timeout * 1000, MOST))


def readable(fds: Iterable[int], timeout: float | None = None) -> set[int]:
    """Return those of `fds` that can be read or have ended, after at most `timeout` seconds."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(milliseconds(timeout))}
