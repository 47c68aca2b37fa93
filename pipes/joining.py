"""`concat` and `zip`: several pipelines into one.

Laws: `concat` of the parts is the whole; a strict `zip` of unequal lengths is an error, at once where they are known;
each part draws from its own keys, so that equal parts draw differently. Parts run in the consumer if one is a stream.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from dataclasses import field
from typing import Any

import numpy as np

from pipes.combining import Joined, Zipped
from pipes.context import Context
from pipes.errors import check_flag
from pipes.nodes import ENDLESS, Indexed, Node, Origin, Positions
from pipes.pipeline import Joint, Pipeline, pipe
from pipes.values import value


def concat(*pipelines: Any) -> Pipeline:
    """Give the elements of each pipeline, one pipeline after the other.

    >>> list(concat([1, 2], [], "a"))
    [1, 2, 'a']

    Keeps length and random access where all parts have them. Holds what its parts hold.
    """
    return Pipeline(_Concat(_parts(pipelines)))


def zip(*pipelines: Any, strict: bool = True) -> Pipeline:
    """Give tuples with one element of each pipeline.

    >>> list(zip([1, 2], "ab"))
    [(1, 'a'), (2, 'b')]
    >>> list(zip([1, 2], "abc", strict=False))
    [(1, 'a'), (2, 'b')]

    If `strict`, pipelines of unequal lengths are a `ValueError`: here where the lengths are known, else where the
    shortest ends. Keeps length and random access where all parts have them. Holds one element of each.
    """
    return Pipeline(_Zip(_parts(pipelines), strict=check_flag("strict", strict)))


def _parts(pipelines: tuple[Any, ...]) -> tuple[Pipeline, ...]:
    parts = tuple(p if isinstance(p, Pipeline) else pipe(p) for p in pipelines)
    for i, part in builtins.enumerate(parts):
        if part.seed or part.epoch:
            raise ValueError(f"a part must not have its own seed or epoch, got part {i}: {part!r}; seed the whole")
        if part.merge is not None:
            raise ValueError(f"a part must not have shard_by_worker, got part {i}: {part!r}; shard the whole")
    return parts


@value
class _Join(Joint):
    parts: tuple[Pipeline, ...]

    @property
    def one_shot(self) -> bool:
        """Whether it can be run only once."""
        return any(part.one_shot for part in self.parts)

    def holds(self) -> str:
        """See `Source.holds`."""
        return "what its parts hold"

    def _nodes(self, context: Context, name: str) -> tuple[list[Node], list[Indexed]]:
        nodes = [
            part.bind(context.at(path=(*context.path, (name, i)), name="", runner=None, deferred=""))
            for i, part in builtins.enumerate(self.parts)
        ]
        return nodes, [node for node in nodes if isinstance(node, Indexed)]


@value
class _Concat(_Join):
    def __repr__(self) -> str:
        return f"concat({', '.join(builtins.map(repr, self.parts))})"

    def bind(self, context: Context) -> Node:
        """See `Source.bind`."""
        nodes, indexed = self._nodes(context, "concat")
        if len(indexed) < len(nodes) or any(node.n == ENDLESS for node in indexed):
            return Joined(nodes, context)
        ends = np.cumsum([node.n for node in indexed], dtype=np.int64)
        starts = ends - np.array([node.n for node in indexed], np.int64)

        def pieces(positions: Positions) -> Iterator[tuple[Indexed, Positions]]:
            which = np.searchsorted(ends, positions, side="right")
            for piece in np.split(np.arange(len(positions)), np.flatnonzero(np.diff(which)) + 1):
                if len(piece):
                    part = int(which[piece[0]])
                    yield indexed[part], positions[piece] - starts[part]

        def origin(k: int) -> Origin:
            part = min(int(np.searchsorted(ends, k, side="right")), len(indexed) - 1)
            return indexed[part].origin(k - int(starts[part]))

        return Indexed(
            int(ends[-1]) if len(ends) else 0,
            lambda positions: [x for node, piece in pieces(positions) for x in node.fetch(piece)],
            context,
            user=any(node.user for node in indexed),
            origin=origin if indexed else None,
        )


@value
class _Zip(_Join):
    strict: bool = field(default=True, kw_only=True)

    def __repr__(self) -> str:
        strict = "" if self.strict else ", strict=False"
        return f"zip({', '.join(builtins.map(repr, self.parts))}{strict})"

    def bind(self, context: Context) -> Node:
        """See `Source.bind`."""
        nodes, indexed = self._nodes(context, "zip")
        lengths = [node.n for node in nodes]
        if self.strict and len({n for n in lengths if n is not None}) > 1:
            raise ValueError(f"pipelines of a strict zip must have equal lengths, got {lengths}; pass strict=False")
        if len(indexed) < len(nodes):
            return Zipped(nodes, context, strict=self.strict, where=self)

        def fetch(positions: Positions) -> list[Any]:
            return list(builtins.zip(*[node.fetch(positions) for node in indexed], strict=True))

        n = min((node.n for node in indexed), default=0)
        return Indexed(n, fetch, context, user=any(node.user for node in indexed))
