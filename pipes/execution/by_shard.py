"""One run of all shards: each on one worker until that dies, merged by the node that asked."""

from __future__ import annotations

import itertools
import reprlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipes.combining import Merged
from pipes.context import Context, Cursor, Pair
from pipes.execution.dealing import AT_A_WORKER, Deadline, Options, Size, deadly, discard, timeout_error
from pipes.execution.messages import Advance, place_of
from pipes.execution.pool import Answered, Died, Pool


@dataclass
class _Shard:
    number: int
    worker: int
    cursor: Cursor  # after the last output that was received
    size: Size
    received: deque[tuple[Answered, Any, Cursor]] = field(default_factory=deque)
    asked: deque[int] = field(default_factory=deque)  # outputs of each task under way
    error: BaseException | None = None
    ended: bool = False
    told: bool = False  # its end or error has reached the merge
    fresh: bool = True
    deaths: int = 0
    suspects: int = 0  # outputs on one of which a worker died


class ShardRun:
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
            worker = (s if self.options.rotate else i) % self.pool.size
            self.shards[s] = _Shard(s, worker, cursors[s], Size(self.options.most_in_a_task))
        for shard in self.shards.values():
            self._ask(shard)
        return [self._outputs(self.shards[s]) if s in self.shards else iter(()) for s in range(len(cursors))]

    def turn(self, number: int) -> int:
        """See `Runner.turn`."""
        if self.options.ordered:
            return number
        waiting = [shard for shard in self.shards.values() if not shard.told]
        waiting.sort(key=lambda shard: (shard.number < number, shard.number))
        deadline = Deadline(self.options.timeout)
        while (ready := next((s for s in waiting if s.received or s.ended), None)) is None:
            if not self._take_events(deadline.left()) and deadline.passed():
                raise timeout_error(self.pool, self.options, waiting[0].worker, f"shard {waiting[0].number}")
        return ready.number

    def abandon(self) -> None:
        """See `UnitRun.abandon`."""
        for shard in self.shards.values():
            while shard.received:
                answer, body, _ = shard.received.popleft()
                answer.discard(body)

    def _outputs(self, shard: _Shard) -> Iterator[Pair]:
        while True:
            deadline = Deadline(self.options.timeout)
            while not shard.received and not shard.ended:
                if not self._take_events(deadline.left()) and deadline.passed():
                    raise timeout_error(self.pool, self.options, shard.worker, f"shard {shard.number}")
            if not shard.received:
                shard.told = True
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
                discard(event, [body for body, _ in event.outputs])
            else:
                self._receive(self.under_way[event.worker].popleft(), event)
        return bool(events)

    def _receive(self, shard: _Shard, event: Answered) -> None:
        shard.asked.popleft()
        pairs = event.outputs
        if shard.ended:  # asked for before the end was known
            discard(event, [body for body, _ in pairs])
            return
        shard.received.extend((event, body, cursor) for body, cursor in pairs)
        if pairs:
            shard.cursor = pairs[-1][1]
        shard.suspects -= len(pairs)
        if shard.suspects <= 0:  # the deadly one was not among those that a worker died on
            shard.deaths = 0
        shard.error = event.error()
        shard.ended = event.ended or shard.error is not None
        shard.size.learn(len(pairs), event.seconds)

    def _move(self, death: Died) -> None:
        """Start a dead worker's shards again in its successor, from the last output received."""
        blamed = next(iter(self.under_way[death.worker]), None)
        self.under_way[death.worker].clear()
        if blamed is not None:
            blamed.deaths += 1
            blamed.suspects = max(blamed.suspects, sum(blamed.asked))
            blamed.size = Size(self.options.most_in_a_task)  # one by one, what precedes the deadly one is delivered
            if blamed.deaths > self.options.restarts:
                blamed.ended = True
                what = f"shard {blamed.number} after cursor {reprlib.repr(blamed.cursor)}"
                blamed.error = deadly(death, what, self.options)
        for shard in self.shards.values():
            if shard.worker == death.worker and not shard.ended:
                shard.asked.clear()
                shard.fresh = True
                self._ask(shard)
