"""Stages that choose and move elements: `shuffle_buffer`, `take`, `skip`, `repeat`, `enumerate`.

Laws: `take(n)` and `skip(n)` split a pipeline; `shuffle_buffer(n)` permutes and moves no element more than n-1 places
either way; repetition r of `repeat(times)` in epoch e is epoch `e*times + r` for everything before it.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from pipes import seeds
from pipes.columns import Columns, joined
from pipes.combining import Repeated
from pipes.context import Context
from pipes.errors import StageError, check_size
from pipes.heads import ShippedHead
from pipes.nodes import ENDLESS, Indexed, Node, Positions
from pipes.stage import Block, Stage, Upstream
from pipes.values import value


@value
class shuffle_buffer(Block):
    """Shuffle within windows of `size` consecutive elements.

    >>> sorted(shuffle_buffer(4)(range(10))) == list(range(10))
    True
    >>> list(shuffle_buffer(1)("abc"))
    ['a', 'b', 'c']

    The first window's length is drawn anew each epoch, so that the cuts move. No element moves more than `size - 1`
    places. Unlike a replace-one buffer it is positional: it keeps random access, and a resume loses nothing. Holds
    `size` elements and pulls at most `size` ahead.
    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("size", self.size))

    def holds(self) -> str:
        """See `Stage.holds`."""
        return f"{self.size} elements"

    def _first(self, context: Context) -> int:
        return 1 + context.key[0] % self.size

    def cut(self, k: int, context: Context) -> int:
        """See `Block.cut`."""
        return self.size if k else self._first(context)

    def outputs(self, k: int, block: list[Any], context: Context) -> list[Any]:
        """See `Block.outputs`."""
        return [block[i] for i in seeds.permutation(context.key, k, len(block)).tolist()]

    def length(self, n: int | float, context: Context) -> int | float:
        """See `Block.length`."""
        return n

    def first_input(self, k: int, context: Context) -> int:
        """See `Block.first_input`."""
        return k

    def at(self, positions: Positions, n: int | float, context: Context) -> Positions:
        """See `Block.at`."""
        first = self._first(context)
        windows = np.where(positions < first, 0, (positions - first) // self.size + 1)
        out = np.empty(len(positions), np.int64)
        for k in np.unique(windows).tolist():
            begin = first + (k - 1) * self.size if k else 0
            end = int(min(n, first + k * self.size))
            inside = windows == k
            out[inside] = begin + _window(context.key, k, end - begin)[positions[inside] - begin]
        return out


@lru_cache(maxsize=8)
def _window(key: seeds.Key, k: int, size: int) -> Positions:
    """The permutation of one window, kept for the next positions in it."""
    return seeds.permutation(key, k, size)


@value
class take(Block):
    """Give the first `size` elements and pull no more.

    >>> list(take(2)("abc")), list(take(0)("abc"))
    (['a', 'b'], [])

    Keeps random access. Holds nothing.
    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("size", self.size, least=0))

    def cut(self, k: int, context: Context) -> int:
        """See `Block.cut`."""
        return int(k < self.size)

    def outputs(self, k: int, block: list[Any], context: Context) -> list[Any]:
        """See `Block.outputs`."""
        return block

    def length(self, n: int | float, context: Context) -> int | float:
        """See `Block.length`."""
        return min(n, self.size)

    def at(self, positions: Positions, n: int | float, context: Context) -> Positions:
        """See `Block.at`."""
        return positions

    def first_input(self, k: int, context: Context) -> int:
        """See `Block.first_input`."""
        return k


@value
class skip(Block):
    """Leave out the first `size` elements.

    >>> list(skip(2)("abc")), list(skip(5)("abc"))
    (['c'], [])

    Keeps random access, where it costs nothing; a stream is drawn and discarded, without what `map` and `collate` would
    do to it. Holds nothing.
    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("size", self.size, least=0))

    def outputs(self, k: int, block: list[Any], context: Context) -> list[Any]:
        """See `Block.outputs`."""
        return block if k >= self.size else []

    def length(self, n: int | float, context: Context) -> int | float:
        """See `Block.length`."""
        return max(n - self.size, 0)

    def at(self, positions: Positions, n: int | float, context: Context) -> Positions:
        """See `Block.at`."""
        return positions + self.size

    def first_input(self, k: int, context: Context) -> int:
        """See `Block.first_input`."""
        return k + self.size

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """See `Stage.bind`: what user functions would compute only to be left out is not computed."""
        node = upstream(context)
        if isinstance(node, ShippedHead) and not node.steps:
            return node.skipping(self.size)
        return super().bind(lambda _: node, context)


@value
class enumerate(Block):
    """Pair each element with its position, counted from `start`.

    >>> list(enumerate(start=5)("ab"))
    [(5, 'a'), (6, 'b')]

    Keeps random access. Holds nothing.
    """

    start: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", check_size("start", self.start, least=-(2**63)))

    def outputs(self, k: int, block: list[Any], context: Context) -> list[tuple[int, Any]]:
        """See `Block.outputs`."""
        return [(self.start + k, block[0])]

    def length(self, n: int | float, context: Context) -> int | float:
        """See `Block.length`."""
        return n

    def first_input(self, k: int, context: Context) -> int:
        """See `Block.first_input`."""
        return k

    def indexed(self, node: Indexed, context: Context) -> Indexed:
        """See `Block.indexed`: the elements change, not the positions."""

        def fetch(positions: Positions) -> list[Any]:
            return list(builtins.zip((positions + self.start).tolist(), node.fetch(positions), strict=True))

        return Indexed(node.n, fetch, context, user=node.user, origin=node.origin)


@value
class repeat(Stage):
    """Run everything before it `times` times, or endlessly.

    >>> list(repeat(2)("ab"))
    ['a', 'b', 'a', 'b']

    Each repetition is another epoch for what comes before: repetition r in epoch e is epoch `e * times + r` (endless:
    `e * 2**64 + r`), so a shuffle before it differs each time. Keeps random access. An empty repetition of an endless
    repeat is an error. Holds nothing.
    """

    times: int | None = None

    def __post_init__(self) -> None:
        if self.times is not None:
            object.__setattr__(self, "times", check_size("times", self.times, advice="pass None to repeat endlessly"))

    @property
    def replays(self) -> bool:
        """See `Stage.replays`."""
        return self.times != 1

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """See `Stage.bind`."""
        first_epoch = context.epoch * (self.times or 1 << 64)

        @lru_cache(maxsize=8)
        def repetition(r: int) -> Node:
            return upstream(context.at(epoch=first_epoch + r))

        node, times = repetition(0), self.times or ENDLESS
        if not isinstance(node, Indexed):
            return Repeated(repetition, times, context, self)
        if node.n == 0 and times == ENDLESS:
            raise ValueError(f"{self!r} would repeat a source of length 0 endlessly; check the source or pass `times`")
        return node if node.n == ENDLESS else self._indexed(node, repetition, times, context)

    def _indexed(
        self, first: Indexed, repetition: Callable[[int], Any], times: int | float, context: Context
    ) -> Indexed:
        n = int(first.n)

        def node(r: int) -> Indexed:
            again: Indexed = repetition(r)
            if again.n != n:
                raise StageError(
                    f"{self!r}: repetition {r} has length {again.n} and the first one {n}; "
                    "every epoch of a random-access pipeline must have the same length"
                )
            return again

        def parts(positions: Positions) -> Iterator[tuple[Indexed, Positions]]:
            repetitions = positions // n
            cuts = np.flatnonzero(np.diff(repetitions)) + 1
            for part in np.split(positions, cuts):
                r = int(part[0]) // n if len(part) else 0
                yield node(r), part - r * n

        def fetch(positions: Positions) -> list[Any]:
            return [x for up, part in parts(positions) for x in up.fetch(part)]

        def columns(positions: Positions) -> Columns:
            gathered = [up.columns(part) for up, part in parts(positions) if up.columns is not None]
            return gathered[0] if len(gathered) == 1 else joined(gathered)

        return Indexed(
            n * times if n else 0,
            fetch,
            context,
            user=first.user,
            origin=lambda p: node(p // n).origin(p % n),
            columns=None if first.columns is None else columns,
        )
