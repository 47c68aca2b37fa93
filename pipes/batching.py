"""`batch`: many elements into one list.

Laws: agrees with `itertools.batched`; `unbatch` undoes it; a whole batch of positions reaches the source in one call.
"""

from __future__ import annotations

import itertools
from dataclasses import field
from typing import Any

import numpy as np

from pipes.context import Context
from pipes.errors import check_flag, check_size
from pipes.nodes import ENDLESS, Indexed, Node, Positions
from pipes.stage import Block, Upstream, ship
from pipes.values import value


@value
class batch(Block):
    """Collect `size` consecutive elements into a list.

    >>> list(batch(2)([1, 2, 3]))
    [[1, 2], [3]]
    >>> list(batch(2, drop_last=True)([1, 2, 3]))
    [[1, 2]]

    `drop_last` leaves out a short last batch. Keeps random access. Holds `size` elements; pulls no more than it gives.
    """

    size: int
    drop_last: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("size", self.size))
        check_flag("drop_last", self.drop_last)

    def holds(self) -> str:
        """See `Stage.holds`."""
        return f"{self.size} elements"

    def cut(self, k: int, context: Context) -> int:
        """See `Block.cut`."""
        return self.size

    def outputs(self, k: int, block: list[Any], context: Context) -> list[list[Any]]:
        """See `Block.outputs`."""
        return [block] if len(block) == self.size or not self.drop_last else []

    def length(self, n: int | float, context: Context) -> int | float:
        """See `Block.length`."""
        if n == ENDLESS:
            return n
        return int(n) // self.size if self.drop_last else -(-int(n) // self.size)

    def first_input(self, k: int, context: Context) -> int:
        """See `Block.first_input`."""
        return k * self.size

    def indexed(self, node: Indexed, context: Context) -> Indexed:
        """See `Block.indexed`: one position here is a range of positions below."""

        def span(p: int) -> Positions:
            return np.arange(p * self.size, int(min((p + 1) * self.size, node.n)))

        def fetch(positions: Positions) -> list[Any]:
            spans = [span(p) for p in positions.tolist()]
            if len(spans) == 1:
                return [node.fetch(spans[0])]
            elements = iter(node.fetch(np.concatenate(spans)) if spans else ())
            return [list(itertools.islice(elements, len(s))) for s in spans]

        columns = node.columns
        return Indexed(
            self.length(node.n, context),
            fetch,
            context,
            user=node.user,
            origin=lambda p: node.origin(p * self.size),
            groups=None if columns is None else lambda positions: [columns(span(p)) for p in positions.tolist()],
        )

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """See `Stage.bind`: on a head of shipped elements a batch becomes part of the unit."""
        node = upstream(context)
        return ship(node, self, context) or super().bind(lambda _: node, context)
