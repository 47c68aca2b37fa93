"""`sample`: visit a map-style source in a given order.

Laws: the i-th output is the element at the order's i-th index, and nothing else is read; an order that is an iterable
is drawn by the consumer alone, afresh for each epoch, with the global generators seeded.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from pipes import seeds
from pipes.context import Context
from pipes.heads import ShippedHead
from pipes.isolation import isolated
from pipes.nodes import ENDLESS, Drawing, Indexed, Node, OneShot, Positions
from pipes.orders import Order, check_range, index_array, subset
from pipes.stage import Elementwise, Origins, Stage, Upstream, takes_rng
from pipes.values import value


@value
class sample(Stage):
    """Visit a map-style source in the given order.

    >>> list(sample([2, 0, 0])("abc"))
    ['c', 'a', 'a']
    >>> list(sample([[0, 1], [2]])("abc"))
    [['a', 'b'], ['c']]

    `order` is `sequential()`, `shuffled()`, `with_replacement(size)`, `weighted(weights, size)`, `subset(indices)`,
    `shuffled_subset(indices)`, or any iterable of indices: a list, a torch sampler, a batch sampler (an element that is
    a list of indices gives the list of those samples). A callable is called with the length of the source, and with
    an `rng` if it takes one, and returns the indices. A sequence keeps random access; other iterables are drawn as a
    stream by the consumer, afresh for each epoch, after their `set_epoch` if they have one. Holds the order's memory.
    """

    order: Any

    def __post_init__(self) -> None:
        order = self.order
        if isinstance(order, builtins.type) and issubclass(order, Order):
            raise TypeError(f"`order` must be an order, got the class {order.__name__}; call it: {order.__name__}()")
        if not isinstance(order, Order) and not callable(order) and not hasattr(order, "__iter__"):
            raise TypeError(f"`order` must be an order, an iterable of indices or a callable, got {order!r}")
        if hasattr(order, "__iter__") and hasattr(order, "__next__"):
            object.__setattr__(self, "order", OneShot(order))

    @property
    def one_shot(self) -> bool:
        """Whether the order can be drawn only once."""
        return isinstance(self.order, OneShot)

    def holds(self) -> str:
        """See `Stage.holds`."""
        return "its order"

    def bind(self, upstream: Upstream, context: Context) -> Node:
        """See `Stage.bind`."""
        node = upstream(context)
        if not isinstance(node, Indexed) or node.n == ENDLESS:
            raise TypeError(f"{self!r} needs random access and got a stream; use shuffle_buffer(size) instead")
        order = self._order(int(node.n), context)
        if isinstance(order, Order):
            return _reordered(node, order, context)
        if isinstance(order, Sequence) or hasattr(order, "tolist"):
            nested = len(order) and not isinstance(order[0], (int, np.integer)) and np.ndim(order[0]) > 0
            return _nested(node, order, context) if nested else _reordered(node, subset(order), context)
        if not hasattr(order, "__iter__") and not isinstance(order, OneShot):
            raise TypeError(f"{self!r} must give indices, got {order!r}")
        return ShippedHead(self._indices(order, context), context, ((_lookup(node), context),))

    def _order(self, n: int, context: Context) -> Any:
        if isinstance(self.order, (Order, OneShot)) or hasattr(self.order, "__iter__"):
            return self.order
        rng = {"rng": context.rng((0,))} if takes_rng(self.order) else {}
        with isolated(*context.key):
            return self.order(n, **rng)

    def _indices(self, order: Any, context: Context) -> Node:
        def draw(context: Context) -> Iterator[Any]:
            if hasattr(order, "set_epoch"):
                order.set_epoch(context.epoch)
            key = context.at(name=f"{context.name}:order").key
            context.globals.seed(*key, 0)
            indices = iter(order.take(self, "sample(lambda n: ...)") if isinstance(order, OneShot) else order)
            return _seeded_draws(indices, context, key)

        return Drawing(draw, context, self, length_hint(order))


def _seeded_draws(indices: Iterator[Any], context: Context, key: seeds.Key) -> Iterator[Any]:
    """Draw indices some at a time, with the global generators seeded for each time: a sampler may draw from them."""
    for k in itertools.count(1):
        drawn: list[Any] = []
        failure: Exception | None = None
        try:
            drawn.extend(itertools.islice(indices, DRAWN_AT_ONCE))  # keeps what came before an exception
        except Exception as error:  # noqa: BLE001  # raised below, behind what came before it
            failure = error
        yield from drawn
        if failure is not None:
            raise failure
        if len(drawn) < DRAWN_AT_ONCE:
            return
        context.globals.seed(*key, k)


DRAWN_AT_ONCE = 32


def length_hint(iterable: Any) -> int | None:
    """Return `len(iterable)`, or None where it has none."""
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):
        return None


def _reordered(node: Indexed, order: Order, context: Context) -> Indexed:
    n = int(node.n)
    size, at, columns = order.length(n), order.bind(n, context.key), node.columns
    return Indexed(
        size,
        lambda positions: node.fetch(at(positions)),
        context,
        user=node.user,
        columns=None if columns is None else lambda positions: columns(at(positions)),
    )


def _nested(node: Indexed, order: Sequence[Any], context: Context) -> Indexed:
    """An order of lists of indices."""
    for indices in order:
        check_range(index_array(indices, "indices"), node.n)
    return Indexed(
        len(order), lambda positions: look_up(node, [order[p] for p in positions.tolist()]), context, user=node.user
    )


def look_up(node: Indexed, indices: Sequence[Any]) -> list[Any]:
    """Fetch indices, or lists of indices as lists of samples, in one call to the node."""
    if not any(np.ndim(i) for i in indices):
        return node.fetch(_checked(indices, node))
    lists = [index_array(i, "indices") for i in indices]
    flat = iter(node.fetch(_checked(np.concatenate(lists), node)))
    return [list(itertools.islice(flat, len(i))) for i in lists]


def _checked(indices: Any, node: Indexed) -> Positions:
    array = index_array(indices, "indices")
    check_range(array, node.n)
    return array


@value
class _lookup(Elementwise):
    """From shipped indices to samples: what a worker does for an order that the consumer draws."""

    node: Any
    exact: ClassVar[bool] = True
    keeps_index: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        """Fetching may run the dataset's code."""
        return bool(self.node.user)

    def apply_all(self, xs: list[Any], origins: Origins, at: Positions, context: Context) -> list[Any]:
        """See `Elementwise.apply_all`: one call for all."""
        return look_up(self.node, xs)
