"""Nodes of several runs: one after the other, side by side, again and again, and in rotation.

Laws: those of `nodes`; a cursor holds the cursors of the runs it is made of.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Iterator, Sequence

from pipes import info
from pipes.context import Context, Cursor, Pair
from pipes.nodes import ENDLESS, Node


class Joined(Node):
    """Streams one after the other."""

    def __init__(self, parts: Sequence[Node], context: Context) -> None:
        self.parts, self.context = parts, context
        lengths = [part.n for part in parts]
        self.n = None if None in lengths else sum(n for n in lengths if n is not None)

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """The cursor is (part, cursor in it)."""
        first, inner = cursor or (0, None)
        for i in builtins.range(first, len(self.parts)):
            for y, after in self.parts[i].run(inner):
                yield y, (i, after)
            inner = None

    def replays(self, cursor: Cursor) -> int:
        """See `Node.replays`."""
        return self.parts[cursor[0]].replays(cursor[1]) if cursor else 0


class Zipped(Node):
    """Streams side by side."""

    def __init__(self, parts: Sequence[Node], context: Context, *, strict: bool, where: object) -> None:
        self.parts, self.context, self.strict, self.where = parts, context, strict, where
        lengths = [part.n for part in parts]
        self.n = None if None in lengths else min((n for n in lengths if n is not None), default=0)

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """The cursor is one cursor per part."""
        cursors = cursor or [None] * len(self.parts)
        runs = [part.run(c) for part, c in builtins.zip(self.parts, cursors)]
        for k in itertools.count():
            pairs = []
            for i, run in builtins.enumerate(runs):
                pair = next(run, None)
                if pair is None and self.strict:
                    self._check_all_ended(runs, i, k)
                if pair is None:
                    return
                pairs.append(pair)
            if not pairs:
                return
            yield tuple(x for x, _ in pairs), tuple(c for _, c in pairs)

    def replays(self, cursor: Cursor) -> int:
        """See `Node.replays`."""
        return sum(part.replays(c) for part, c in builtins.zip(self.parts, cursor or ()))

    def _check_all_ended(self, runs: Sequence[Iterator[Pair]], ended: int, k: int) -> None:
        longer = 0 if ended else next((i for i, run in builtins.enumerate(runs[1:], 1) if next(run, None)), None)
        if longer is not None:
            raise ValueError(
                f"{self.where!r}: part {ended} ended after {k} elements and part {longer} did not; "
                "pass strict=False to stop with the shortest"
            )


class Repeated(Node):
    """A stream under one epoch after another."""

    def __init__(self, repetition: Callable[[int], Node], times: int | float, context: Context, where: object) -> None:
        self.repetition, self.times, self.context, self.where = repetition, times, context, where
        self.first = repetition(0)
        n = self.first.n
        self.n = None if n is None else n * times if n else 0
        self.user = self.first.user

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """The cursor is (repetition, cursor in it)."""
        r, inner = cursor or (0, None)
        while r < self.times:
            empty = inner is None
            for y, after in self.repetition(r).run(inner):
                empty = False
                yield y, (r, after)
            if empty and self.times == ENDLESS:
                raise ValueError(f"{self.where!r}: repetition {r} of an endless repeat is empty, which would never end")
            r, inner = r + 1, None

    def replays(self, cursor: Cursor) -> int:
        """See `Node.replays`."""
        return self.repetition(cursor[0]).replays(cursor[1]) if cursor else 0


class Merged(Node):
    """Shards in fixed rotation; a finished shard leaves it."""

    DONE = "done"

    def __init__(self, nodes: Sequence[Node], context: Context) -> None:
        self.nodes, self.context = nodes, context
        lengths = [node.n for node in nodes]
        self.n = None if None in lengths else sum(n for n in lengths if n is not None)

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """The cursor is (whose turn, one cursor per shard)."""
        turn, given = cursor or (0, [None] * len(self.nodes))
        cursors: list[Cursor] = list(given)
        if self.context.runner is not None:
            runs = self.context.runner.shards(self, cursors)
        else:
            runs = [iter(()) if c == self.DONE else node.run(c) for node, c in builtins.zip(self.nodes, cursors)]
        while any(c != self.DONE for c in cursors):
            s = turn if self.context.runner is None else self.context.runner.turn(turn)
            turn = (s + 1) % len(self.nodes)
            if cursors[s] == self.DONE:
                continue
            with info.in_shard(s, len(self.nodes)):
                pair = next(runs[s], None)
            if pair is None:
                cursors[s] = self.DONE
            else:
                y, cursors[s] = pair
                yield y, (turn, tuple(cursors))

    def replays(self, cursor: Cursor) -> int:
        """See `Node.replays`."""
        pairs = builtins.zip(self.nodes, cursor[1] if cursor else ())
        return sum(node.replays(c) for node, c in pairs if c != self.DONE)
