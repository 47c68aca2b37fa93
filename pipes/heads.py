"""Heads: the part of a pipeline that workers can compute, unit by unit.

A unit is computed from its number alone (random access) or from a few elements that the consumer drew (a stream). The
plan is a function of the pipeline, and the serial run follows it, since seeds and cursors depend on it. Laws: the
outputs of a unit depend on (context, number, payload) only; outputs before a failing one are delivered.

* `PositionHead`: unit u is the u-th position of an `Indexed`, then elementwise stages. Where those are only `map` and
  `filter`, a unit is 32 positions, computed together: one seeding and one bulk fetch for 32 tiny elements.
* `ShippedHead`: a stream drawn by the consumer, then `map`, `batch`, `collate`, then elementwise stages. Unit u is the
  fixed number of elements that its output needs.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipes.combining import Joined, Repeated, Zipped
from pipes.context import Context, Cursor, Pair
from pipes.nodes import (
    ENDLESS,
    Blocks,
    Drawing,
    Indexed,
    Node,
    Opaque,
    Origin,
    Positions,
    Segment,
    Step,
    Stepping,
    seeded,
    through,
)

TOGETHER = 32

type Payload = Any
type Unit = tuple[int, Payload, Cursor, Cursor]


class Head(Node):
    """What the two kinds of head share: units in, (element, cursor) out. The cursor is (where unit began, outputs)."""

    steps: tuple[Step, ...]

    def payloads(self, begin: Cursor) -> Iterator[Unit]:
        """Yield (number, payload, cursor before it, cursor behind it) of each unit from `begin` on."""
        raise NotImplementedError(f"{type(self).__name__} must define payloads(begin)")

    def outputs(self, unit: int, payload: Payload) -> Iterator[Any]:
        """Yield the outputs of one unit, seeded."""
        raise NotImplementedError(f"{type(self).__name__} must define outputs(unit, payload)")

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """Run the units one after the other, here or wherever the context's runner does."""
        if self.context.runner is not None:
            return self.context.runner.units(self, cursor)
        return self.run_here(cursor)

    def run_here(self, cursor: Cursor = None) -> Iterator[Pair]:
        """Run the units one after the other, in this process."""
        begin, given = cursor or (None, 0)
        if not self.steps and not given:  # one output a unit: the common case, and a third of a microsecond less
            for unit, payload, _, after in self.payloads(begin):
                for y in self.outputs(unit, payload):
                    yield y, (after, 0)
            return
        for unit, payload, before, after in self.payloads(begin):
            for j, y in builtins.enumerate(self.outputs(unit, payload), 1):
                if j > given:
                    yield y, self.cursor(before, after, j)
            given = 0

    def cursor(self, before: Cursor, after: Cursor, j: int) -> Cursor:
        """Return the cursor behind the j-th output of a unit; a unit of one output is not computed again."""
        return (before, j) if self.steps else (after, 0)

    @property
    def is_long(self) -> bool:
        """Whether a unit may have any number of outputs, even without an end."""
        return not all(stage.keeps_index for stage, _ in self.steps)

    def then(self, stage: Any, context: Context) -> Node:
        """Return this head with one more elementwise stage."""
        raise NotImplementedError(f"{type(self).__name__} must define then(stage, context)")


class PositionHead(Head):
    """Units by position: nothing but a number goes to a worker."""

    def __init__(self, units: Indexed, steps: tuple[Step, ...] = ()) -> None:
        self.units, self.steps, self.context = units, steps, units.context
        self.n = None if steps else units.n
        self.user = units.user or any(stage.draws for stage, _ in steps)
        self.size = TOGETHER if steps and all(stage.keeps_index for stage, _ in steps) else 1

    def then(self, stage: Any, context: Context) -> PositionHead:
        """See `Head.then`."""
        return PositionHead(self.units, (*self.steps, (stage, context)))

    def origin(self, k: int) -> Origin:
        """Without a filter behind it a position keeps its number."""
        return super().origin(k) if self.steps else self.units.origin(k)

    def payloads(self, begin: Cursor) -> Iterator[Unit]:
        """See `Head.payloads`; the cursor is the unit's number."""
        unit = begin or 0
        while unit * self.size < self.units.n:
            yield unit, None, unit, unit + 1
            unit += 1

    def outputs(self, unit: int, payload: Payload) -> Iterator[Any]:
        """See `Head.outputs`."""
        first = unit * self.size
        seed = self.units.origin(first) if self.user else None
        if self.size == 1:
            return seeded(self._lazily(first), self.context, seed, at_most_one=not self.steps)
        return self._together(np.arange(first, int(min(first + self.size, self.units.n))), seed)

    def _lazily(self, position: int) -> Iterator[Any]:
        x = self.units.fetch(np.array([position]))[0]
        if self.steps:
            yield from through(self.steps, x, self.units.origin(position))
        else:
            yield x

    def _together(self, positions: Positions, seed: Origin | None) -> Iterator[Any]:
        """Compute a unit of many positions at once; what precedes a fault is given before it is raised."""
        outputs: list[Any] = []
        failure: Exception | None = None
        if seed is not None:
            self.context.globals.seed(*seed)
        try:
            for p, x in self._elements(positions):
                outputs.extend(through(self.steps, x, self.units.origin(p)))
        except Exception as error:  # noqa: BLE001  # raised below
            failure = error
        yield from outputs
        if failure is not None:
            raise failure

    def _elements(self, positions: Positions) -> Iterator[tuple[int, Any]]:
        """Fetch in bulk where nothing draws; else one by one, so that a fault changes no draw of what precedes it."""
        if not self.units.user:
            try:
                elements = self.units.fetch(positions)
            except Exception:  # noqa: BLE001, S110  # raised again below, at the element that fails
                pass
            else:
                yield from builtins.zip(positions.tolist(), elements, strict=True)
                return
        for p in positions.tolist():
            yield p, self.units.fetch(np.array([p]))[0]


class ShippedHead(Head):
    """Units of elements that the consumer draws and ships, so that no stream is ever read twice."""

    ENDED = "end"

    def __init__(
        self,
        source: Node,
        context: Context,
        inner: tuple[Step, ...] = (),
        size: int = 1,
        steps: tuple[Step, ...] = (),
        skipped: int = 0,
    ) -> None:
        self.source, self.context, self.inner, self.size, self.steps = source, context, inner, size, steps
        self.skipped = skipped
        self.user = any(stage.draws for stage, _ in (*inner, *steps))
        known = source.n is not None and not steps
        self.n = max(self._bound([], 0, source.n or 0).n - skipped, 0) if known else None

    def then(self, stage: Any, context: Context) -> ShippedHead:
        """Append a stage: inside the unit while every stage so far is positional, behind it afterwards."""
        step = (stage, context)
        if self.steps or not stage.exact:
            return ShippedHead(self.source, self.context, self.inner, self.size, (*self.steps, step), self.skipped)
        return ShippedHead(self.source, self.context, (*self.inner, step), self.size, skipped=self.skipped)

    def batched(self, stage: Any, context: Context) -> ShippedHead:
        """Append a `batch`, not behind skipped units (which may be no multiple of it): a unit grows by its size."""
        return ShippedHead(self.source, self.context, (*self.inner, (stage, context)), self.size * stage.size)

    def origin(self, k: int) -> Origin:
        """A unit is numbered by its first element."""
        return super().origin(k) if self.steps else self.source.origin((k + self.skipped) * self.size)

    def payloads(self, begin: Cursor) -> Iterator[Unit]:
        """See `Head.payloads`; the cursor is (the stream's, the unit's number)."""
        upstream, unit = begin or (None, 0)
        if upstream == self.ENDED:
            return
        pairs = self.source.run(upstream)
        while block := list(itertools.islice(pairs, self.size)):
            short = len(block) < self.size  # and so the last, also for a rank that has one element more
            before, upstream = upstream, self.ENDED if short else block[-1][1]
            if unit >= self.skipped:
                yield unit, [x for x, _ in block], (before, unit), (upstream, unit + 1)
            unit += 1

    def outputs(self, unit: int, payload: Payload) -> Iterator[Any]:
        """See `Head.outputs`."""
        seed = self.source.origin(unit * self.size) if self.user else None
        at_most_one = all(stage.keeps_index for stage, _ in self.steps)
        return seeded(self._lazily(unit, payload), self.context, seed, at_most_one=at_most_one)

    def replays(self, cursor: Cursor) -> int:
        """See `Node.replays`."""
        begin = cursor[0] if cursor else None
        return self.source.replays(begin[0]) if begin and begin[0] != self.ENDED else 0

    def skipping(self, units: int) -> ShippedHead:
        """Leave out units without computing them: their elements are drawn and not shipped."""
        return ShippedHead(self.source, self.context, self.inner, self.size, skipped=self.skipped + units)

    def _bound(self, elements: list[Any], base: int, n: int | float) -> Indexed:
        """The positional stages over the shipped elements, as if they were the whole stream's."""

        def fetch(positions: Positions) -> list[Any]:
            return [elements[p - base] for p in positions.tolist()]

        node = Indexed(n, fetch, self.context, origin=self.source.origin)
        for stage, context in self.inner:
            node = stage.indexed(node, context)
        return node

    def _lazily(self, unit: int, elements: list[Any]) -> Iterator[Any]:
        base = unit * self.size
        node = self._bound(elements, base, ENDLESS if len(elements) == self.size else base + len(elements))
        if unit < node.n:  # else the short last batch that `drop_last` leaves out
            x = node.fetch(np.array([unit]))[0]
            yield from through(self.steps, x, node.origin(unit)) if self.steps else (x,)


def drawn_here(node: Node) -> bool:
    """Tell whether a stream holds no user function yet, so that the consumer draws it."""
    if isinstance(node, Repeated):
        return drawn_here(node.first)
    if isinstance(node, (Blocks, Opaque)):
        return drawn_here(node.up)
    return isinstance(node, (Drawing, Stepping, Joined, Zipped))


def extend(node: Node, stage: Any, context: Context) -> Node:
    """Append an elementwise stage to a node: in the head while that lasts, behind it afterwards."""
    if stage.consumer and not isinstance(node, Segment):  # a seam: what is before it may run elsewhere
        return Segment(node, context, ((stage, context),))
    if isinstance(node, Indexed):
        bound: Node = stage.indexed(node, context) if stage.exact else PositionHead(node).then(stage, context)
        return bound
    if drawn_here(node):
        node = ShippedHead(node, node.context)
    if isinstance(node, (Head, Segment)):
        return node.then(stage, context)
    return Segment(node, context, ((stage, context),))
