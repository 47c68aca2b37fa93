"""One run of a head: units dealt to whoever is idle, results in the order of the serial run."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipes.context import Cursor, Pair
from pipes.errors import WorkerError, WorkerTimeoutError
from pipes.execution.dealing import AT_A_WORKER, Deadline, Options, Size, deadly, discard, timeout_error
from pipes.execution.messages import Units, place_of
from pipes.execution.pool import Answered, Died, Pool
from pipes.heads import Head, Unit


@dataclass(eq=False)
class _Task:
    number: int
    units: list[Unit]
    worker: int = -1
    deaths: int = 0
    given: int = 0  # outputs of the first unit that were received before, in another part of the answer
    answer: Answered | None = None
    failure: WorkerError | None = None  # of a task that kills its workers, raised when its turn comes

    @property
    def is_done(self) -> bool:
        """Whether it can be delivered."""
        return self.answer is not None or self.failure is not None


@dataclass
class UnitRun:
    """One run of a head. Everything that changes lives here and ends with the run."""

    pool: Pool
    options: Options
    run: int
    head: Head
    tasks: deque[_Task] = field(default_factory=deque)  # dealt and not delivered, in order
    again: deque[_Task] = field(default_factory=deque)  # those that died with their worker
    failure: BaseException | None = None  # of the source, raised behind everything drawn before it
    exhausted: bool = False

    def __post_init__(self) -> None:
        self.place = place_of(self.head.context)
        self.at: list[deque[_Task]] = [deque() for _ in range(self.pool.size)]
        self.numbers = itertools.count()
        self.size = Size(self.options.most_in_a_task)

    def pairs(self, cursor: Cursor) -> Iterator[Pair]:
        """Yield (output, cursor after it) in the order of the serial run."""
        begin, given = cursor or (None, 0)
        self.source = self.head.payloads(begin)
        few = self.options.prefetch * self.pool.size
        while True:
            self._deal(few)
            if not self.tasks:
                break
            task = self._next_answered(few)
            self._replace(task)
            self._take_events(0.0)
            self._deal(few)
            yield from self._delivered(task, given)
            given = max(0, given - sum(map(len, task.answer.outputs))) if task.answer else 0
        if self.failure is not None:
            raise self.failure

    def _replace(self, task: _Task) -> None:
        """Take a task out; where its answer was a part, put the rest in its place, for the worker that has it open."""
        place = self.tasks.index(task)
        del self.tasks[place]
        answer = task.answer
        if answer is None or answer.ended or answer.error() is not None:
            return
        done = len(answer.outputs)
        given = len(answer.outputs[-1]) + (task.given if done == 1 else 0)
        rest = _Task(next(self.numbers), task.units[done - 1 :], worker=task.worker, given=given)
        self.tasks.insert(place, rest)
        self._send(rest, task.worker)

    def _delivered(self, task: _Task, given: int) -> Iterator[Pair]:
        answer = task.answer
        if answer is None:
            raise task.failure or TypeError("a task was delivered before it was done; this is a fault of pipes")
        left = deque(
            (body, self.head.cursor(before, after, j))
            for i, ((_, _, before, after), bodies) in enumerate(zip(task.units, answer.outputs))
            for j, body in enumerate(bodies, 1 if i else task.given + 1)
        )
        try:
            while left:
                body, cursor = left.popleft()
                if given:
                    given -= 1
                    answer.discard(body)
                else:
                    yield answer.decode(body), cursor
        finally:
            for body, _ in left:
                answer.discard(body)
        if (error := answer.error()) is not None:
            raise error

    def _next_answered(self, few: int) -> _Task:
        """Wait until a task can be delivered: the first, or any where order does not matter."""
        deadline = Deadline(self.options.timeout)
        while True:
            candidates = [self.tasks[0]] if self.options.ordered else self.tasks
            done = next((task for task in candidates if task.is_done), None)
            if done is not None:
                return done
            self._deal(self.options.window * few)
            if not self._take_events(deadline.left()) and deadline.passed():
                raise self._stuck(self.tasks[0])

    def _take_events(self, timeout: float | None) -> bool:
        events = self.pool.wait(timeout)
        for event in events:
            if isinstance(event, Died):
                self._redo(event)
            elif event.run != self.run:
                discard(event, itertools.chain.from_iterable(event.outputs))
            else:
                task = self.at[event.worker].popleft()  # a worker answers in order
                task.answer = event
                self.size.learn(len(task.units), event.seconds)
        return bool(events)

    def _deal(self, limit: int) -> None:
        """Give tasks to the least busy workers, or in rotation, while fewer than `limit` are not delivered."""
        at_a_worker = min(AT_A_WORKER, self.options.prefetch)
        while True:
            worker = min(range(self.pool.size), key=lambda w: len(self.at[w]))
            if not self.options.rotate and len(self.at[worker]) >= at_a_worker:
                return
            task = self.again.popleft() if self.again else self._drawn() if len(self.tasks) < limit else None
            if task is None:
                return
            self._send(task, task.units[0][0] % self.pool.size if self.options.rotate else worker)

    def _send(self, task: _Task, worker: int) -> None:
        task.worker = worker
        self.at[worker].append(task)
        units = [(unit, payload) for unit, payload, *_ in task.units]
        self.pool.send(worker, Units(self.run, task.number, self.place, units, task.given))

    def _drawn(self) -> _Task | None:
        """Draw the units of one more task from the source, which only the consumer ever reads."""
        if self.exhausted:
            return None
        units: list[Unit] = []
        try:
            for unit, payload, *cursors in itertools.islice(self.source, self.size.units):
                units.append((unit, self._packed(unit, payload), *cursors))  # what came before an exception is kept
        except Exception as error:  # noqa: BLE001  # raised behind everything that was drawn before it
            self.failure, self.exhausted = error, True
        if len(units) < self.size.units:
            self.exhausted = True
        if not units:
            return None
        task = _Task(next(self.numbers), units)
        self.tasks.append(task)
        return task

    def _packed(self, unit: int, payload: Any) -> Any:
        """Serialise elements that are shipped, here, where a failure has its position."""
        if payload is None:
            return None
        try:
            return self.pool.pack(payload)
        except Exception as error:
            raise WorkerError(
                f"the elements of unit {unit} cannot be sent to a worker: {type(error).__name__}: {error}; "
                "draw what can be pickled, and open it in map"
            ) from error

    def _redo(self, death: Died) -> None:
        """Deal a dead worker's tasks again; the first of them is to blame, since a worker works in order.

        It is dealt unit by unit then, so that the blame comes to lie on one, and those before it are delivered.
        """
        lost = list(self.at[death.worker])
        self.at[death.worker].clear()
        if lost:
            blamed, *innocent = lost
            blamed.deaths += 1
            if blamed.deaths > self.options.restarts:
                blamed.failure = deadly(death, self._named(blamed), self.options)
                lost = innocent
            elif len(blamed.units) > 1:
                lost = [*self._split(blamed), *innocent]
        self.again.extendleft(reversed(lost))

    def _split(self, task: _Task) -> list[_Task]:
        parts = [_Task(next(self.numbers), [unit], deaths=task.deaths) for unit in task.units]
        parts[0].given = task.given
        place = self.tasks.index(task)
        self.tasks = deque([*list(self.tasks)[:place], *parts, *list(self.tasks)[place + 1 :]])
        return parts

    def _named(self, task: _Task) -> str:
        first, last = task.units[0][0], task.units[-1][0]
        return f"unit {first}" if first == last else f"units {first} to {last}"

    def _stuck(self, task: _Task) -> WorkerTimeoutError:
        return timeout_error(self.pool, self.options, task.worker, self._named(task))

    def abandon(self) -> None:
        """Let go of results that nobody wants; a newer run makes the workers skip what is left."""
        while self.tasks:
            answer = self.tasks.popleft().answer
            if answer is not None:
                discard(answer, itertools.chain.from_iterable(answer.outputs))
