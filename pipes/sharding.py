"""Stages that divide the work: `shard_by_worker` and `shard_by_rank`.

Laws: shards and ranks are disjoint and cover the source; their sizes differ by at most one, or are equal when dropped
or padded as asked; a shard's or rank's elements keep the numbers that key their draws in the whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any

import numpy as np

from pipes.context import Context
from pipes.errors import check_choice, check_flag, check_size
from pipes.nodes import ENDLESS, Indexed, Node, Positions
from pipes.stage import Block, Upstream
from pipes.values import value


@value
class shard_by_worker(Block):
    """Divide what follows into `shards`, each run by one worker, merged in fixed rotation.

    >>> from pipes import pipe, batch
    >>> list(pipe(range(6), shard_by_worker(2), batch(2)))
    [[0, 2], [1, 3], [4], [5]]

    Everything before it is replayed in each shard, which keeps every `shards`-th element; everything after it, up to
    the first stage placed in the consumer, runs per shard: batches, windows, `take` and `enumerate` are the shard's
    own. The number of shards belongs to the pipeline and not to the machine, so the order is the same for any number of
    workers. Holds `shards` elements.
    """

    shards: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", check_size("shards", self.shards))

    @property
    def replays(self) -> bool:
        """See `Stage.replays`."""
        return self.shards > 1

    def holds(self) -> str:
        """See `Stage.holds`."""
        return f"{self.shards} elements"

    def cut(self, k: int, context: Context) -> int:
        """See `Block.cut`."""
        return self.shards if k else (context.shard or 0) + 1

    def outputs(self, k: int, block: list[Any], context: Context) -> list[Any]:
        """See `Block.outputs`: a block ends with the shard's element."""
        return block[-1:] if len(block) == self.cut(k, context) else []

    def length(self, n: int | float, context: Context) -> int | float:
        """See `Block.length`."""
        return n if n == ENDLESS else len(range(context.shard or 0, int(n), self.shards))

    def at(self, positions: Positions, n: int | float, context: Context) -> Positions:
        """See `Block.at`."""
        return positions * self.shards + (context.shard or 0)

    def first_input(self, k: int, context: Context) -> int:
        """See `Block.first_input`."""
        return k * self.shards + (context.shard or 0)

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """See `Stage.bind`: what comes before belongs to no shard."""
        return super().bind(lambda c: upstream(c.at(shard=None)), context)

    def __call__(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Run alone: the rotation over the shards is the input's own order."""
        return (x for x in iterable)


@value
class shard_by_rank(Block):
    """Keep every `world_size`-th element, beginning with the `rank`-th: this process's share of the data.

    >>> list(shard_by_rank(1, 2)(range(5)))
    [1, 3]
    >>> list(shard_by_rank(1, 2, uneven="pad")(range(5)))
    [1, 3, 4]

    `rank` and `world_size` default to what torchrun puts in the environment (RANK, WORLD_SIZE; else 0 of 1), read when
    the stage is made. Where the length is no multiple of `world_size`, "keep" gives the first ranks one element more,
    "drop" leaves the incomplete last round out, "pad" fills it with elements of that round, so that every rank has the
    same number. With `mask` elements are (element, valid), and `valid` is False for those repeated, so that an
    evaluation counts no sample twice. Keeps random access, and an element draws what it draws in the whole. Holds
    `world_size` elements.
    """

    rank: int | None = None
    world_size: int | None = None
    uneven: str = field(default="keep", kw_only=True)
    mask: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_choice("uneven", self.uneven, ("keep", "drop", "pad"))
        if check_flag("mask", self.mask) and self.uneven != "pad":
            raise ValueError(f'`mask` marks what uneven="pad" repeats, got uneven={self.uneven!r}; leave mask out')
        world_size = _environment("WORLD_SIZE", 1) if self.world_size is None else self.world_size
        rank = _environment("RANK", 0) if self.rank is None else self.rank
        size = check_size("world_size", world_size)
        number = check_size("rank", rank, least=0)
        if number >= size:
            raise ValueError(f"`rank` must be < `world_size`, got rank {number} of {size}; ranks count from 0")
        object.__setattr__(self, "world_size", size)
        object.__setattr__(self, "rank", number)

    @property
    def _world(self) -> tuple[int, int]:
        return self.rank or 0, self.world_size or 1

    def holds(self) -> str:
        """See `Stage.holds`."""
        return f"{self.world_size} elements"

    def cut(self, k: int, context: Context) -> int:
        """See `Block.cut`: a round, the same for every rank, so that a state of one serves all."""
        return self._world[1]

    def outputs(self, k: int, block: list[Any], context: Context) -> list[Any]:
        """See `Block.outputs`."""
        rank, world_size = self._world
        if rank < len(block) and (len(block) == world_size or self.uneven != "drop"):
            return self._marked(block[rank], valid=True)
        return self._marked(block[rank % len(block)], valid=False) if self.uneven == "pad" else []

    def _marked(self, x: Any, *, valid: bool) -> list[Any]:
        return [(x, valid)] if self.mask else [x]

    def indexed(self, node: Indexed, context: Context) -> Node:
        """See `Block.indexed`."""
        plain = super().indexed(node, context)
        if not self.mask or not isinstance(plain, Indexed):
            return plain
        n, (rank, world_size) = node.n, self._world

        def fetch(positions: Positions) -> list[Any]:
            valid = (positions * world_size + rank < n).tolist()
            return list(zip(plain.fetch(positions), valid, strict=True))

        return Indexed(plain.n, fetch, context, user=plain.user, origin=plain.origin)

    def length(self, n: int | float, context: Context) -> int | float:
        """See `Block.length`."""
        rank, world_size = self._world
        if n == ENDLESS:
            return n
        if self.uneven == "keep":
            return len(range(rank, int(n), world_size))
        return int(n) // world_size if self.uneven == "drop" else -(-int(n) // world_size)

    def at(self, positions: Positions, n: int | float, context: Context) -> Positions:
        """See `Block.at`."""
        rank, world_size = self._world
        begin = positions * world_size
        if self.uneven != "pad" or n == ENDLESS:
            return begin + rank
        in_round: Positions = np.minimum(world_size, int(n) - begin)
        return begin + rank % in_round

    def first_input(self, k: int, context: Context) -> int:
        """See `Block.first_input`."""
        rank, world_size = self._world
        return k * world_size + rank


def _environment(name: str, default: int) -> int:
    """Read an integer that torchrun sets."""
    text = os.environ.get(name)
    try:
        return default if text is None else int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable {name} must be an integer, got {text!r}; pass rank and world_size instead"
        ) from None
