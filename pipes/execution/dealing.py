"""What dealing by unit and dealing by shard share: options, the size of a task, waits, and what ends badly."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipes.errors import WorkerError, WorkerTimeoutError
from pipes.execution.pool import Answered, Died, Pool

TASK_SECONDS = 2e-3
MOST_IN_A_TASK = 1024
AT_A_WORKER = 2
WINDOW = 4
"""How many times `prefetch` the reorder window is, by default, while the consumer waits for a slow task."""


@dataclass(frozen=True)
class Options:
    """How tasks are dealt: nothing here may change the output, but `ordered=False`.

    A task is at most `most_in_a_task` units; while the consumer waits for a slow one, up to `window` times `prefetch`
    tasks per worker are under way. With `rotate` unit (or shard) k is worker k's, modulo their number, as torch deals
    batches: what a worker draws from its own generators then does not depend on its speed.
    """

    prefetch: int = 2
    ordered: bool = True
    timeout: float | None = None
    restarts: int = 3
    most_in_a_task: int = MOST_IN_A_TASK
    window: int = WINDOW
    rotate: bool = False


class Size:
    """How many units make a task: as many as take a millisecond or two, found as answers come."""

    def __init__(self, most: int) -> None:
        self.units, self._most = 1, most

    def learn(self, count: int, seconds: float) -> None:
        """Grow at most twofold, since the first units are the slowest."""
        if count:
            fitting = int(TASK_SECONDS * count / max(seconds, 1e-9))
            self.units = max(1, min(fitting, 2 * self.units, self._most))


def discard(answer: Answered, bodies: Iterable[Any]) -> None:
    """Let go of outputs that nobody wants."""
    for body in bodies:
        answer.discard(body)


def deadly(death: Died, what: str, options: Options) -> WorkerError:
    """Word the error for work that killed its workers too often."""
    others = f", as {options.restarts} before it did" if options.restarts else ""
    error = WorkerError(f"{death.how} on {what}{others}; run that part with workers=0 to see why")
    error.pid, error.status = death.pid, death.status
    return error


class Deadline:
    """When a wait is over; never, without a timeout."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Return the seconds that are left."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        """Tell whether the time is over."""
        return self._end is not None and time.monotonic() >= self._end


def timeout_error(pool: Pool, options: Options, worker: int, what: str) -> WorkerTimeoutError:
    """Word the error for a worker that is stuck."""
    return WorkerTimeoutError(
        f"{pool.name(worker)} gave no result for {what} within `timeout` = {options.timeout} s; it stands at\n"
        f"{pool.stack(worker)}"
    )
