"""Divide a pipeline: how many of its stages workers compute, and what of it they need.

Laws: a function of the pipeline alone; the part that workers get gives the units of the whole, with the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipes.context import Context
from pipes.heads import Head, PositionHead, ShippedHead, drawn_here
from pipes.nodes import Drawing, Indexed, Node
from pipes.pipeline import Pipeline
from pipes.sampling import sample
from pipes.stage import Source, opaque
from pipes.values import value


@dataclass(frozen=True)
class Plan:
    """`part` is what workers compute: shards of it, or units of its head; None where there is nothing to compute."""

    part: Pipeline | None
    by_shard: bool = False
    deferred: str = ""

    def head(self, context: Context) -> Head:
        """Return the head whose units a worker computes."""
        node = None if self.part is None else self.part.bind(context)
        if isinstance(node, Indexed):
            return PositionHead(node)
        if isinstance(node, Head):
            return node
        raise TypeError(f"a plan must have a head to be run by units, got {node!r}; this is a fault of pipes")


def divide(pipeline: Pipeline) -> Plan:
    """Return the plan of a pipeline."""
    if pipeline.merge is not None:
        part = replace(pipeline, stages=pipeline.stages[: pipeline.merge])
        return Plan(part, by_shard=True, deferred=_last(part))
    part = replace(pipeline, stages=pipeline.stages[: pipeline.head_size])
    node = part.bind(Context())
    if drawn_here(node):
        return Plan(None)
    return Plan(_without_what_is_drawn(part) if isinstance(node, ShippedHead) else part, deferred=_last(part))


def _last(part: Pipeline) -> str:
    """Name the last stage: its conversion to tensors, if it has one, is left to the consumer."""
    return part.names[-1] if part.stages else ""


@value
class _Drawn(Source):
    """Stands for a source that the consumer draws and workers never see."""

    def bind(self, context: Context) -> Node:
        """See `Source.bind`."""
        return Drawing(_nothing, context.at(name="source"), self)


def _nothing(*_: Any) -> Iterator[Any]:
    raise AssertionError("a worker drew from a stream that only the consumer draws; this is a fault of pipes")


@value
class _Undrawn:
    """Stands for an order that the consumer draws."""

    def __iter__(self) -> Iterator[Any]:
        return _nothing()


def _without_what_is_drawn(part: Pipeline) -> Pipeline:
    """Leave out what only the consumer runs: it may hold files and locks, and need not survive pickling."""
    first = next(i for i in range(len(part.stages)) if isinstance(part.bind(Context(), i + 1), ShippedHead))
    before, stage, after = part.stages[:first], part.stages[first], part.stages[first + 1 :]
    if isinstance(stage, sample):  # the consumer draws the order, and workers look samples up
        return replace(part, stages=(*before, sample(_Undrawn()), *after))
    stubs = tuple(opaque(_nothing) if isinstance(s, opaque) else s for s in before)
    return replace(part, source=_Drawn(), stages=(*stubs, stage, *after))
