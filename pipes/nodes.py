"""Nodes: a pipeline bound to a context, ready to run.

A node is random access (`Indexed`) or a stream; a stream's `run(cursor)` is a generator of (element, cursor), where
the cursor is a value: the state of the run after that element. Laws: running from the cursor that came with an element
gives exactly what followed it; a run changes neither the node nor what it was made of, so two runs are independent;
nothing is pulled before the first `next`.

What workers can compute is in `heads`; what remains here is what the consumer (or one shard) runs element by element.
"""

from __future__ import annotations

import builtins
import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pipes import info
from pipes.columns import Columns
from pipes.context import Context, Cursor, Pair
from pipes.errors import StageError, locate, stopped
from pipes.info import WorkerInfo

type Positions = npt.NDArray[np.int64]
type Origin = tuple[int, int, int]
type Length = int | float | None
type Step = tuple[Any, Context]

ENDLESS = math.inf
END = object()


class Node:
    """What every node tells: `n` (its length, infinite, or None where unknown) and `user` (may user code draw)."""

    context: Context
    n: Length = None
    user: bool = False

    def origin(self, k: int) -> Origin:
        """Return what keys the draws of the k-th element: two words for the run of positions, and a number in it."""
        return (*self.context.unit_key, k)

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """Yield (element, cursor after it) from `cursor` on."""
        raise NotImplementedError(f"{type(self).__name__} must define run(cursor)")

    def replays(self, cursor: Cursor) -> int:
        """Return how many elements a run from `cursor` draws again and discards."""
        return 0


class Indexed(Node):
    """Random access: `fetch(positions)` returns the elements there, in one call to whatever is below.

    `columns(positions)` is the same data gathered column by column, where the source can; `groups(positions)` the
    same for a batch: one `Columns` per position. Only `collate` asks for them.
    """

    def __init__(
        self,
        n: int | float,
        fetch: Callable[[Positions], list[Any]],
        context: Context,
        *,
        user: bool = False,
        origin: Callable[[int], Origin] | None = None,
        columns: Callable[[Positions], Columns] | None = None,
        groups: Callable[[Positions], list[Columns]] | None = None,
    ) -> None:
        self.n: int | float = n
        self.fetch, self.context, self.user = fetch, context, user
        self.columns, self.groups = columns, groups
        self._origin = origin

    def origin(self, k: int) -> Origin:
        """See `Node.origin`; a stage that only moves positions asks the node below."""
        if self._origin is not None:
            return self._origin(k)
        return super().origin(k)

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """Run the positions in order, as the units of a head."""
        from pipes.heads import PositionHead  # heads are made of nodes

        return PositionHead(self).run(cursor)


class Drawing(Node):
    """A stream source: iterates `factory()` afresh for each run; its cursor is a count."""

    def __init__(self, factory: Callable[[Context], Iterable[Any]], context: Context, where: object, n: Length = None):
        self.factory, self.context, self.where, self.n = factory, context, where, n

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """Seek if the iterator can (by torchdata's protocol), else replay and discard; then go on."""
        k, done = 0, cursor or 0
        try:
            elements = iter(self.factory(self.context))
            if hasattr(elements, "load_state_dict") and hasattr(elements, "state_dict"):
                if cursor is not None:
                    k, state = cursor
                    elements.load_state_dict(copy.deepcopy(state))
                for k, x in builtins.enumerate(elements, k + 1):  # noqa: B020  # the count goes on
                    yield x, (k, copy.deepcopy(elements.state_dict()))
                return
            for k, x in builtins.enumerate(elements, 1):
                if k > done:
                    yield x, k
        except Exception as error:
            locate(error, self.where, k, "element")
            raise

    def replays(self, cursor: Cursor) -> int:
        """See `Node.replays`."""
        return cursor if isinstance(cursor, int) else 0


class Stepping(Node):
    """A stream source that can seek: `pairs(context, cursor)` goes on behind a cursor of its own."""

    def __init__(self, pairs: Callable[[Context, Cursor], Iterator[Pair]], context: Context) -> None:
        self.pairs, self.context = pairs, context

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """Seek, then go on."""
        return self.pairs(self.context, cursor)


class Blocks(Node):
    """A block stage on a stream."""

    def __init__(self, up: Node, stage: Any, context: Context) -> None:
        self.up, self.stage, self.context = up, stage, context
        self.n = None if up.n is None else stage.length(up.n, context)

    def origin(self, k: int) -> Origin:
        """A stage that only moves positions keeps the numbers of the elements; others number their first input."""
        first = self.stage.first_input(k, self.context)
        return super().origin(k) if first is None else self.up.origin(first)

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """Drive `cut` and `outputs`. The cursor is (upstream's when block k began, k, outputs of it given)."""
        begin, k, given = cursor or (None, 0, 0)
        stage, context = self.stage, self.context
        pairs = self.up.run(begin)
        while block := list(itertools.islice(pairs, stage.cut(k, context))):
            before, begin = begin, block[-1][1]
            try:
                outputs = stage.outputs(k, [x for x, _ in block], context)
                last = len(outputs) if isinstance(outputs, list) else -1
                for j, y in builtins.enumerate(outputs, 1):
                    if j > given:  # behind the last output of a block a resume need not draw it again
                        yield y, (begin, k + 1, 0) if j == last else (before, k, j)
            except Exception as error:
                locate(error, stage, k, "block")
                raise
            k, given = k + 1, 0

    def replays(self, cursor: Cursor) -> int:
        """See `Node.replays`."""
        return self.up.replays(cursor[0]) if cursor else 0


class Segment(Node):
    """A run of elementwise stages on a stream that is no head: one unit per input element."""

    def __init__(self, up: Node, context: Context, steps: tuple[Step, ...] = ()) -> None:
        self.up, self.context, self.steps = up, context, steps
        self.user = any(stage.draws for stage, _ in steps)
        self.exact = all(stage.exact for stage, _ in steps)
        self.at_most_one = all(stage.keeps_index for stage, _ in steps)
        self.n = up.n if self.exact else None

    def then(self, stage: Any, context: Context) -> Segment:
        """Return this segment with one more stage."""
        return Segment(self.up, self.context, (*self.steps, (stage, context)))

    def origin(self, k: int) -> Origin:
        """One-to-one stages keep the numbers of the elements."""
        return self.up.origin(k) if self.exact else super().origin(k)

    def seeding(self) -> tuple[int, int] | None:
        """What tells this segment's draws from those of the units before it; None where nothing may draw."""
        return self.context.at(name=f"segment:{self.steps[0][1].name}").key if self.user and self.steps else None

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """Like a block stage with blocks of one element."""
        begin, k, given = cursor or (None, 0, 0)
        salt = self.seeding()
        for x, after in self.up.run(begin):
            origin = self.up.origin(k)
            seed = None if salt is None else (*salt, *origin)
            outputs = seeded(through(self.steps, x, origin), self.context, seed, at_most_one=self.at_most_one)
            if self.exact:  # the cursor needs no count of outputs, and may point behind the element
                yield next(outputs), (after, k + 1, 0)
            else:
                for j, y in builtins.enumerate(outputs, 1):
                    if j > given:
                        yield y, (begin, k, j)
            begin, k, given = after, k + 1, 0

    def replays(self, cursor: Cursor) -> int:
        """See `Node.replays`."""
        return self.up.replays(cursor[0]) if cursor else 0


class Opaque(Node):
    """A user's callable from iterator to iterator: one block that is the whole stream."""

    def __init__(self, up: Node, stage: Any, context: Context) -> None:
        self.up, self.stage, self.context = up, stage, context

    def run(self, cursor: Cursor = None) -> Iterator[Pair]:
        """Replay and discard what the cursor counts, then go on."""
        pulls = (x for x, _ in self.up.run())
        k = 0
        try:
            for k, y in builtins.enumerate(self.stage.call(pulls, self.context), 1):
                if k > (cursor or 0):
                    yield y, k
        except Exception as error:
            locate(error, self.stage, k, "output")
            raise

    def replays(self, cursor: Cursor) -> int:
        """See `Node.replays`."""
        return cursor or 0


def through(steps: Sequence[Step], x: Any, key: tuple[int, ...]) -> Iterator[Any]:
    """Yield the outputs of one element through elementwise stages, lazily.

    The key follows the element: one-to-one stages and `filter` keep it, the j-th output of the others has (*key, j).
    """
    for i, (stage, context) in builtins.enumerate(steps):
        try:
            outputs = stage.apply(x, key, context)
            many = None if stage.keeps_index or stage.exact else _outputs(stage, iter(outputs), key)
        except StopIteration as error:
            raise stopped(stage, key[2]) from error
        except Exception as error:
            locate(error, stage, key[2])
            raise
        if many is not None:
            for j, y in builtins.enumerate(many):
                yield from through(steps[i + 1 :], y, (*key, j))
            return
        if not outputs:
            if stage.exact:
                raise StageError(f"{stage!r} is exact and must give one output, got none at input position {key[2]}")
            return
        x = outputs[0]
    yield x


def _outputs(stage: Any, outputs: Iterator[Any], key: tuple[int, ...]) -> Iterator[Any]:
    """The outputs of one stage, with a note on what goes wrong in it, and not behind it."""
    try:
        yield from outputs
    except Exception as error:
        locate(error, stage, key[2])
        raise


def seeded(
    outputs: Iterator[Any], context: Context, seed: tuple[int, ...] | None, *, at_most_one: bool
) -> Iterator[Any]:
    """Seed the global generators before each output of a unit is computed, by (unit, number of the output).

    Seeding costs more than most elements do: `at_most_one` spares the one that only finds the end.
    """
    if seed is None:
        yield from outputs
        return
    for j in itertools.count():
        context.globals.seed(*seed, j)
        if (y := next(outputs, END)) is END:
            return
        yield y
        if at_most_one:
            return


@contextmanager
def here(context: Context) -> Iterator[None]:
    """Run user code for one output: it sees `worker_info`, and leaves the caller's global generators as they were.

    What is under way in the same context is set aside: a function may look into the pipeline that it belongs to.
    """
    token = info.current.set(WorkerInfo(0, 0, context.seed, context.epoch))
    aside = context.globals.set_aside()
    try:
        yield
    finally:
        info.current.reset(token)
        context.globals.restore()
        context.globals.take_up(aside)


def delivered(pairs: Iterator[Pair], context: Context) -> Iterator[Pair]:
    """Give each element with the caller's global generators, and its `worker_info`, as they were."""
    here = WorkerInfo(0, 0, context.seed, context.epoch)
    while True:
        token = info.current.set(here)
        try:
            pair = next(pairs, None)
        finally:
            info.current.reset(token)
            context.globals.restore()
        if pair is None:
            return
        yield pair


class OneShot:
    """Hand out an iterator once, and say so the second time."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._name = type(iterator).__name__

    def take(self, where: object, advice: str = "from_iterable(lambda: ...)") -> Iterator[Any]:
        """Return the iterator, the first time."""
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            raise StageError(
                f"{where!r} is a one-shot iterator and was run already; a second run would be empty, "
                f"so pass a function that makes a fresh iterator: {advice}"
            )
        return iterator

    def __repr__(self) -> str:
        return f"<{self._name}>"
