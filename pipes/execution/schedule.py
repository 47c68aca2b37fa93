"""Deal tasks to the workers of a pool and put the results in order.

Laws: the sequence is the serial run's, whatever the number of workers, their speed and their deaths; a task holds as
many units as take about a millisecond; while the consumer is busy at most `prefetch` tasks per worker are ahead, and
while it waits for one slow task the others go on, up to a bounded window; every wait ends when a worker does.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipes.combining import Merged
from pipes.context import Context, Cursor, Pair
from pipes.errors import WorkerError, WorkerTimeoutError
from pipes.execution.messages import Advance, Units, place_of
from pipes.execution.pool import Answered, Died, Pool
from pipes.heads import Head, Unit

TASK_SECONDS = 1e-3
MOST_IN_A_TASK = 1024
AT_A_WORKER = 2
WINDOW = 4
"""How many times `prefetch` the reorder window is while the consumer waits for a slow task."""


@dataclass(frozen=True)
class Options:
    """How tasks are dealt: nothing here may change the output, but `ordered=False`."""

    prefetch: int = 2
    ordered: bool = True
    timeout: float | None = None
    restarts: int = 3


@dataclass(eq=False)
class _Task:
    number: int
    units: list[Unit]
    worker: int = -1
    deaths: int = 0
    answer: Answered | None = None
    failure: WorkerError | None = None  # of a task that kills its workers, raised when its turn comes

    @property
    def is_done(self) -> bool:
        """Whether it can be delivered."""
        return self.answer is not None or self.failure is not None


class Scheduler:
    """Run heads and shards on a pool: the `Runner` that a context carries. One run at a time has the workers."""

    def __init__(self, pool: Pool, options: Options) -> None:
        self._pool, self._options = pool, options
        self._runs = itertools.count()
        self._running: _UnitRun | _ShardRun | None = None

    def abandon(self) -> None:
        """End the run that has the workers: nobody wants its results."""
        running, self._running = self._running, None
        if running is not None:
            running.abandon()

    def units(self, head: Head, cursor: Cursor) -> Iterator[Pair]:
        """See `Runner.units`; a stage that runs what is before it twice at once computes the second run itself."""
        if self._running is not None:
            yield from head.run_here(cursor)
            return
        self._running = run = _UnitRun(self._pool, self._options, next(self._runs), head)
        try:
            yield from run.pairs(cursor)
        finally:
            run.abandon()
            if self._running is run:
                self._running = None

    def shards(self, merge: Merged, cursors: Sequence[Cursor]) -> list[Iterator[Pair]]:
        """See `Runner.shards`."""
        self.abandon()
        self._running = run = _ShardRun(self._pool, self._options, next(self._runs), merge.context)
        return run.iterators(cursors)


class _Size:
    """How many units make a task: as many as take about a millisecond, found as answers come."""

    def __init__(self) -> None:
        self.units = 1

    def learn(self, count: int, seconds: float) -> None:
        """Grow at most twofold, since the first units are the slowest."""
        if count:
            fitting = int(TASK_SECONDS * count / max(seconds, 1e-9))
            self.units = max(1, min(fitting, 2 * self.units, MOST_IN_A_TASK))


@dataclass
class _UnitRun:
    """One run of a head. Everything that changes lives here and ends with the run."""

    pool: Pool
    options: Options
    run: int
    head: Head
    tasks: deque[_Task] = field(default_factory=deque)  # dealt and not delivered, in order
    again: deque[_Task] = field(default_factory=deque)  # those that died with their worker
    size: _Size = field(default_factory=_Size)
    failure: BaseException | None = None  # of the source, raised behind everything drawn before it
    exhausted: bool = False

    def __post_init__(self) -> None:
        self.place = place_of(self.head.context)
        self.at: list[deque[_Task]] = [deque() for _ in range(self.pool.size)]
        self.numbers = itertools.count()

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
            self.tasks.remove(task)
            self._take_events(0.0)
            self._deal(few)
            yield from self._delivered(task, given)
            given = 0
        if self.failure is not None:
            raise self.failure

    def _delivered(self, task: _Task, given: int) -> Iterator[Pair]:
        answer = task.answer
        if answer is None:
            raise task.failure or TypeError("a task was delivered before it was done; this is a fault of pipes")
        left = deque(
            (body, self.head.cursor(before, after, j))
            for (_, _, before, after), bodies in zip(task.units, answer.outputs)
            for j, body in enumerate(bodies, 1)
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
        deadline = _Deadline(self.options.timeout)
        while True:
            candidates = [self.tasks[0]] if self.options.ordered else self.tasks
            done = next((task for task in candidates if task.is_done), None)
            if done is not None:
                return done
            self._deal(WINDOW * few)
            if not self._take_events(deadline.left()) and deadline.passed():
                raise self._stuck(self.tasks[0])

    def _take_events(self, timeout: float | None) -> bool:
        events = self.pool.wait(timeout)
        for event in events:
            if isinstance(event, Died):
                self._redo(event)
            elif event.run != self.run:
                _discard(event, itertools.chain.from_iterable(event.outputs))
            else:
                task = self.at[event.worker].popleft()  # a worker answers in order
                task.answer = event
                self.size.learn(len(task.units), event.seconds)
        return bool(events)

    def _deal(self, limit: int) -> None:
        """Give tasks to the least busy workers while fewer than `limit` are dealt and not delivered."""
        most = min(AT_A_WORKER, self.options.prefetch)
        while True:
            worker = min(range(self.pool.size), key=lambda w: len(self.at[w]))
            if len(self.at[worker]) >= most:
                return
            task = self.again.popleft() if self.again else self._drawn() if len(self.tasks) < limit else None
            if task is None:
                return
            task.worker = worker
            self.at[worker].append(task)
            units = [(unit, payload) for unit, payload, *_ in task.units]
            self.pool.send(worker, Units(self.run, task.number, self.place, units))

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
                blamed.failure = _deadly(death, self._named(blamed), self.options)
                lost = innocent
            elif len(blamed.units) > 1:
                lost = [*self._split(blamed), *innocent]
        self.again.extendleft(reversed(lost))

    def _split(self, task: _Task) -> list[_Task]:
        parts = [_Task(next(self.numbers), [unit], deaths=task.deaths) for unit in task.units]
        place = self.tasks.index(task)
        self.tasks = deque([*list(self.tasks)[:place], *parts, *list(self.tasks)[place + 1 :]])
        return parts

    def _named(self, task: _Task) -> str:
        first, last = task.units[0][0], task.units[-1][0]
        return f"unit {first}" if first == last else f"units {first} to {last}"

    def _stuck(self, task: _Task) -> WorkerTimeoutError:
        return _timeout_error(self.pool, self.options, task.worker, self._named(task))

    def abandon(self) -> None:
        """Let go of results that nobody wants; a newer run makes the workers skip what is left."""
        while self.tasks:
            answer = self.tasks.popleft().answer
            if answer is not None:
                _discard(answer, itertools.chain.from_iterable(answer.outputs))


def _discard(answer: Answered, bodies: Iterable[Any]) -> None:
    for body in bodies:
        answer.discard(body)


def _deadly(death: Died, what: str, options: Options) -> WorkerError:
    others = f", as {options.restarts} before it did" if options.restarts else ""
    return WorkerError(f"{death.how} on {what}{others}; run that part with workers=0 to see why")


class _Deadline:
    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


def _timeout_error(pool: Pool, options: Options, worker: int, what: str) -> WorkerTimeoutError:
    return WorkerTimeoutError(
        f"{pool.name(worker)} gave no result for {what} within `timeout` = {options.timeout} s; it stands at\n"
        f"{pool.stack(worker)}"
    )


# -- by shard ----------------------------------------------------------------------------------------------------------


@dataclass
class _Shard:
    number: int
    worker: int
    cursor: Cursor  # after the last output that was received
    received: deque[tuple[Answered, Any, Cursor]] = field(default_factory=deque)
    asked: deque[int] = field(default_factory=deque)  # outputs of each task under way
    error: BaseException | None = None
    ended: bool = False
    fresh: bool = True
    deaths: int = 0
    size: _Size = field(default_factory=_Size)


class _ShardRun:
    """One run of all shards, each on a fixed worker until that dies."""

    def __init__(self, pool: Pool, options: Options, run: int, context: Context) -> None:
        self.pool, self.options, self.run, self.place = pool, options, run, place_of(context)
        self.shards: dict[int, _Shard] = {}
        self.under_way: list[deque[_Shard]] = [deque() for _ in range(pool.size)]
        self.numbers = itertools.count()

    def iterators(self, cursors: Sequence[Cursor]) -> list[Iterator[Pair]]:
        """Return one iterator per shard."""
        live = [s for s, cursor in enumerate(cursors) if cursor != Merged.DONE]
        for i, s in enumerate(live):
            self.shards[s] = _Shard(s, i % self.pool.size, cursors[s])
        for shard in self.shards.values():
            self._ask(shard)
        return [self._outputs(self.shards[s]) if s in self.shards else iter(()) for s in range(len(cursors))]

    def abandon(self) -> None:
        """See `_UnitRun.abandon`."""
        for shard in self.shards.values():
            while shard.received:
                answer, body, _ = shard.received.popleft()
                answer.discard(body)

    def _outputs(self, shard: _Shard) -> Iterator[Pair]:
        while True:
            deadline = _Deadline(self.options.timeout)
            while not shard.received and not shard.ended:
                if not self._take_events(deadline.left()) and deadline.passed():
                    raise _timeout_error(self.pool, self.options, shard.worker, f"shard {shard.number}")
            if not shard.received:
                if shard.error is not None:
                    raise shard.error
                return
            answer, body, cursor = shard.received.popleft()
            self._ask(shard)
            yield answer.decode(body), cursor

    def _ask(self, shard: _Shard) -> None:
        """Keep the shard's worker busy: about `prefetch` tasks under way or received."""
        ahead = self.options.prefetch * shard.size.units
        while not shard.ended and len(shard.asked) < AT_A_WORKER and len(shard.received) + sum(shard.asked) < ahead:
            count = shard.size.units
            shard.asked.append(count)
            self.under_way[shard.worker].append(shard)
            task = Advance(self.run, next(self.numbers), self.place, shard.number, shard.fresh, shard.cursor, count)
            shard.fresh = False
            self.pool.send(shard.worker, task)

    def _take_events(self, timeout: float | None) -> bool:
        events = self.pool.wait(timeout)
        for event in events:
            if isinstance(event, Died):
                self._move(event)
            elif event.run != self.run:
                _discard(event, [body for body, _ in event.outputs])
            else:
                self._receive(self.under_way[event.worker].popleft(), event)
        return bool(events)

    def _receive(self, shard: _Shard, event: Answered) -> None:
        shard.asked.popleft()
        pairs = event.outputs
        if shard.ended:  # asked for before the end was known
            _discard(event, [body for body, _ in pairs])
            return
        shard.received.extend((event, body, cursor) for body, cursor in pairs)
        if pairs:
            shard.cursor, shard.deaths = pairs[-1][1], 0
        shard.error = event.error()
        shard.ended = event.ended or shard.error is not None
        shard.size.learn(len(pairs), event.seconds)

    def _move(self, death: Died) -> None:
        """Start a dead worker's shards again in its successor, from the last output received."""
        blamed = next(iter(self.under_way[death.worker]), None)
        self.under_way[death.worker].clear()
        if blamed is not None:
            blamed.deaths += 1
            blamed.size = _Size()  # asked output by output, what precedes the deadly one is delivered
            if blamed.deaths > self.options.restarts:
                blamed.ended = True
                blamed.error = _deadly(death, f"shard {blamed.number} after cursor {blamed.cursor!r}", self.options)
        for shard in self.shards.values():
            if shard.worker == death.worker and not shard.ended:
                shard.asked.clear()
                shard.fresh = True
                self._ask(shard)
