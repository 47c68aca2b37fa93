"""A pool of threads, for code that releases the GIL and for Python without one.

Laws: those of processes but one: threads share the global generators, so only draws through `rng` are reproducible;
the generators are not seeded here at all, since the caller's own code uses them at the same time.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from pipes.execution.launch import Child
from pipes.execution.messages import Reply, Task
from pipes.execution.plan import Plan
from pipes.execution.pool import Answered, Event
from pipes.execution.worker import Computer
from pipes.isolation import Unseeded

GRACE = 1.0


def _as_it_is(x: Any) -> Any:
    return x


class ThreadPool:
    """Start `size` threads, each with a node of its own: nodes cache."""

    def __init__(self, plan: Plan, size: int, *, init: Callable[[int], None] | None) -> None:
        self.size = size
        self._done: queue.SimpleQueue[tuple[int, Reply | BaseException]] = queue.SimpleQueue()
        self._tasks: list[queue.SimpleQueue[Task | None]] = [queue.SimpleQueue() for _ in range(size)]
        self._newest = -1
        self._failure: BaseException | None = None  # of a thread that has ended: raised for good
        self._computers = [
            Computer(plan, number, size, seeding=Unseeded(), collect=_as_it_is, unpack=_as_it_is)
            for number in range(size)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(number, init), name=f"pipes-worker-{number}", daemon=True)
            for number in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int, init: Callable[[int], None] | None) -> None:
        try:
            if init is not None:
                init(number)
            while (task := self._tasks[number].get()) is not None:
                if task.run == self._newest:  # else of a run that was abandoned
                    self._done.put((number, self._computers[number].answer(task)))
        except BaseException as error:  # noqa: BLE001  # a thread's end would otherwise go unnoticed
            self._done.put((number, error))

    @property
    def children(self) -> list[Child]:
        """See `Pool.children`."""
        return []

    def send(self, worker: int, task: Task) -> None:
        """See `Pool.send`. Nodes are bound here: an order that is a callable may draw, which this thread undoes."""
        self._newest = task.run
        self._computers[worker].prepare(task)
        self._tasks[worker].put(task)

    def wait(self, timeout: float | None) -> list[Event]:
        """See `Pool.wait`."""
        if self._failure is not None:
            raise self._failure
        events: list[Event] = []
        try:
            events.append(self._event(*(self._done.get(timeout=timeout) if timeout != 0 else self._done.get_nowait())))
            while True:
                events.append(self._event(*self._done.get_nowait()))
        except queue.Empty:
            return events

    def _event(self, worker: int, reply: Reply | BaseException) -> Answered:
        if isinstance(reply, BaseException):
            self._failure = reply
            raise reply
        answer = reply
        return Answered(
            worker,
            reply.run,
            reply.task,
            reply.ended,
            reply.seconds,
            outputs=answer.outputs,
            decode=_as_it_is,
            discard=_as_it_is,
            error=lambda: answer.error,
        )

    def pack(self, payload: Any) -> Any:
        """See `Pool.pack`: threads share objects."""
        return payload

    def stack(self, worker: int) -> str:
        """See `Pool.stack`."""
        frame = sys._current_frames().get(self._threads[worker].ident or -1)  # its documented name
        return "".join(traceback.format_stack(frame)) if frame else "ended"

    def name(self, worker: int) -> str:
        """See `Pool.name`."""
        return f"worker {worker} (thread {self._threads[worker].name})"

    def close(self) -> None:
        """See `Pool.close`; a thread that user code holds longer than a second is left to end by itself."""
        self._newest = -1  # what is queued is skipped
        for tasks in self._tasks:
            tasks.put(None)
        deadline = time.monotonic() + GRACE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
