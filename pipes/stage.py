"""What a stage is: a frozen dataclass, called on an iterable and returning an iterator.

An author writes one of three kinds and nothing about cursors, seeds, random access of what lies below, or workers:

* `Elementwise`: `apply(x, key, context)` -> the outputs of one element;
* `Block`: `cut(k, context)` -> the length of the k-th input block, 0 at the end, and `outputs(k, block, context)`; for
  random access also `length(n, context)` and `at(positions, n, context)` -> input positions;
* anything else: `bind(upstream, context)` -> a node, where `upstream` is a function of the context.

Laws: calling a stage pulls nothing; a stage has no state, so two calls are independent; alone, on an iterable, it gives
what it gives in a pipeline.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from pipes.context import Context
from pipes.errors import locate
from pipes.heads import ShippedHead, extend
from pipes.nodes import Blocks, Drawing, Indexed, Length, Node, OneShot, Opaque, Positions, through
from pipes.values import Value, show, value

type Upstream = Callable[[Context], Node]
type Origins = Callable[[int], tuple[int, ...]]


class Source(Value):
    """Base of all sources: `bind(context)` returns the node that reads it."""

    def bind(self, context: Context) -> Node:
        """Return the node that reads this source."""
        raise NotImplementedError(f"{type(self).__name__} must define bind(context)")

    def holds(self) -> str:
        """Say what the source holds in memory."""
        return "what it was given"


class Stage(Value):
    """Base of all stages; subclass one of the kinds instead, as a frozen dataclass."""

    consumer: ClassVar[bool] = False
    """Run in the consumer, never in a worker."""

    @property
    def draws(self) -> bool:
        """Whether the stage calls user code that may draw from the global generators."""
        return False

    @property
    def replays(self) -> bool:
        """Whether the stage runs what comes before more than once, which a one-shot iterator cannot."""
        return False

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """Return the node that runs this stage on `upstream`."""
        raise NotImplementedError(f"{type(self).__name__} must define bind(upstream, context)")

    def holds(self) -> str:
        """Say what the stage holds in memory, for `Pipeline.explain`."""
        return "nothing"

    def __call__(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Run the stage alone, here, with seed 0."""
        node = self.bind(lambda context: node_of(iterable, context, self), self._context)
        return (y for y, _ in node.run())

    @property
    def _context(self) -> Context:
        """What the stage has as the first of its name in a pipeline."""
        return Context(name=f"{type(self).__name__}#0")


class Elementwise(Stage):
    """A stage that treats each element by itself."""

    exact: ClassVar[bool] = False
    """Give exactly one output per element: keeps random access and length."""

    keeps_index: ClassVar[bool] = False
    """Give at most one output per element, as a tuple."""

    def apply(self, x: Any, key: tuple[int, ...], context: Context) -> Iterable[Any]:
        """Return the outputs of `x`; `context.rng(key)` is its own generator, `key[2]` its index."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(x, key, context)")

    def apply_all(self, xs: list[Any], origins: Origins, at: Positions, context: Context) -> list[Any]:
        """Return one output for each of `xs`, the elements at positions `at` (one-to-one stages only)."""
        steps = ((self, context),)
        return [next(through(steps, x, origins(p))) for x, p in builtins.zip(xs, at.tolist(), strict=True)]

    def indexed(self, node: Indexed, context: Context) -> Indexed:
        """Return random access to the outputs (one-to-one stages only)."""

        def fetch(positions: Positions) -> list[Any]:
            return self.apply_all(node.fetch(positions), node.origin, positions, context)

        return Indexed(node.n, fetch, context, user=node.user or self.draws, origin=node.origin)

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """See `Stage.bind`."""
        return extend(upstream(context), self, context)

    def __call__(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Run the stage alone, here, with seed 0."""
        return self._alone(iterable, ((self, self._context),), Context(name="unit").key)

    def _alone(self, iterable: Iterable[Any], steps: Any, key: tuple[int, int]) -> Iterator[Any]:
        for k, x in builtins.enumerate(iterable):
            yield from through(steps, x, (*key, k))


class Block(Stage):
    """A stage that cuts its input into blocks and treats each block by itself."""

    def cut(self, k: int, context: Context) -> int:
        """Return the length of the k-th input block; 0 ends the stream without pulling more."""
        return 1

    def outputs(self, k: int, block: list[Any], context: Context) -> Iterable[Any]:
        """Return the outputs of the k-th block, which is short only at the end of the stream."""
        raise NotImplementedError(f"{type(self).__name__} must define outputs(k, block, context)")

    def length(self, n: int | float, context: Context) -> Length:
        """Return the number of outputs of `n` elements (perhaps infinitely many); None where it is unknown."""
        return None

    def at(self, positions: Positions, n: int | float, context: Context) -> Positions:
        """Return the input positions of the outputs at `positions`: what gives a stage random access."""
        raise NotImplementedError(f"{type(self).__name__} has no random access: it does not define `at`")

    def first_input(self, k: int, context: Context) -> int | None:
        """Return which input keys the draws of output k: by it ranks and slices draw what the whole draws.

        None means that outputs are numbered afresh.
        """
        return None

    def indexed(self, node: Indexed, context: Context) -> Node:
        """Return random access to the outputs, or a stream where the stage does not define `at`."""
        n = self.length(node.n, context)
        if n is None or type(self).at is Block.at:
            return Blocks(node, self, context)

        def inputs(positions: Positions) -> Positions:
            return self.at(positions, node.n, context)

        def origin(k: int) -> tuple[int, int, int]:
            first = self.first_input(k, context)
            return (*context.unit_key, k) if first is None else node.origin(first)

        columns = node.columns
        return Indexed(
            n,
            lambda positions: node.fetch(inputs(positions)),
            context,
            user=node.user,
            origin=origin,
            columns=None if columns is None else lambda positions: columns(inputs(positions)),
        )

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """See `Stage.bind`."""
        node = upstream(context)
        by_position = isinstance(node, Indexed) and not self.consumer
        return self.indexed(node, context) if by_position else Blocks(node, self, context)  # type: ignore[arg-type]  # an Indexed by then

    def __call__(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Run the stage alone, here, with seed 0."""
        return self._alone(iterable, self._context)

    def _alone(self, iterable: Iterable[Any], context: Context) -> Iterator[Any]:
        items = iter(iterable)
        for k in itertools.count():
            block = list(itertools.islice(items, self.cut(k, context)))
            if not block:
                return
            try:
                yield from self.outputs(k, block, context)
            except Exception as error:
                locate(error, self, k, "block")
                raise


def node_of(iterable: Iterable[Any], context: Context, where: object) -> Node:
    """Return any iterable as a node: random access where it is a sequence."""
    if hasattr(iterable, "__getitem__") and hasattr(iterable, "__len__"):
        sequence: Any = iterable
        return Indexed(len(sequence), lambda positions: [sequence[p] for p in positions.tolist()], context)
    if iter(iterable) is iterable:
        once = OneShot(iterable)
        return Drawing(lambda _: once.take(where), context, where)
    return Drawing(lambda _: iterable, context, where)


def ship(node: Node, stage: Any, context: Context) -> Node | None:
    """Return the head with a `batch` inside its units, or None where the node is no such head."""
    return (
        node.batched(stage, context) if isinstance(node, ShippedHead) and not node.steps and not node.skipped else None
    )


@value
class opaque(Stage):
    """Any callable from iterable to iterator as a stage: what `pipe` makes of a plain function."""

    fn: Callable[..., Iterable[Any]]

    def __repr__(self) -> str:
        return show(self.fn)

    def holds(self) -> str:
        """See `Stage.holds`."""
        return "unknown"

    def call(self, pulls: Iterator[Any], context: Context) -> Iterator[Any]:
        """Call the function on the stream."""
        made = self.fn(pulls, rng=context.rng((0,))) if takes_rng(self.fn) else self.fn(pulls)
        if not hasattr(made, "__iter__"):
            raise TypeError(f"{self!r} must return an iterator, got {made!r}; is it a function of one element? use map")
        return iter(made)

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """See `Stage.bind`."""
        node = upstream(context)
        return Opaque(node, self, context)


def as_stage(x: Any) -> Stage:
    """Return what a user gave `pipe` behind the source as a stage."""
    if isinstance(x, Stage):
        return x
    if isinstance(x, type) and issubclass(x, Stage):
        raise TypeError(f"a stage is made by a call, got the class {x.__name__}; write {x.__name__}(...)")
    if not callable(x):
        raise TypeError(f"a stage must be callable from iterable to iterator, got {x!r} of type {type(x).__name__}")
    return opaque(x)


def takes_rng(fn: Callable[..., Any]) -> bool:
    """Tell whether `fn` has a parameter named `rng`."""
    try:
        return "rng" in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return False
