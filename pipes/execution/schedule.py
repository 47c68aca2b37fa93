"""Deal tasks to the workers of a pool and put the results in order.

Laws: the sequence is the serial run's, whatever the number of workers, their speed and their deaths; a task holds as
many units as take a millisecond or two; while the consumer is busy at most `prefetch` tasks per worker are ahead, and
while it waits for one slow task the others go on, up to a bounded window; every wait ends when a worker does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pipes.combining import Merged
from pipes.context import Cursor, Pair
from pipes.execution.by_shard import ShardRun
from pipes.execution.by_unit import UnitRun
from pipes.execution.dealing import Options
from pipes.execution.pool import Pool
from pipes.heads import Head


class Scheduler:
    """Run heads and shards on a pool: the `Runner` that a context carries. One run at a time has the workers."""

    def __init__(self, pool: Pool, options: Options) -> None:
        self._pool, self._options = pool, options
        self._runs = itertools.count()
        self._running: UnitRun | ShardRun | None = None

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
        self._running = run = UnitRun(self._pool, self._options, next(self._runs), head)
        try:
            yield from run.pairs(cursor)
        finally:
            run.abandon()
            if self._running is run:
                self._running = None

    def shards(self, merge: Merged, cursors: Sequence[Cursor]) -> list[Iterator[Pair]]:
        """See `Runner.shards`."""
        self.abandon()
        self._running = run = ShardRun(self._pool, self._options, next(self._runs), merge.context)
        return run.iterators(cursors)

    def turn(self, shard: int) -> int:
        """See `Runner.turn`."""
        return self._running.turn(shard) if isinstance(self._running, ShardRun) else shard
