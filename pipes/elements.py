"""Stages that treat each element by itself: `map`, `filter`, `flat_map`, `unbatch`.

Laws: `map(f)` after `map(g)` is `map(f . g)`; an element's draws depend on its index, so they are the same in every
worker; a `StopIteration` out of user code is an error, never an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar

from pipes.context import Context
from pipes.errors import call_each, check_callable
from pipes.nodes import Positions
from pipes.stage import Elementwise, Origins, takes_rng
from pipes.values import value


@value
class _Calling(Elementwise):
    """A stage around a user's function, which gets a generator of its own if it has a parameter named `rng`."""

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        check_callable("fn", self.fn)

    @cached_property
    def wants_rng(self) -> bool:
        """Whether `fn` takes `rng`."""
        return takes_rng(self.fn)

    @property
    def draws(self) -> bool:
        """A function that takes `rng` is taken at its word: the global generators are not seeded for it."""
        return not self.wants_rng

    def call(self, x: Any, key: tuple[int, ...], context: Context) -> Any:
        """Call `fn` on one element."""
        return self.fn(x, rng=context.rng(key)) if self.wants_rng else self.fn(x)


@value
class map(_Calling):
    """Apply `fn` to each element.

    >>> list(map(str)([1, None]))
    ['1', 'None']
    >>> def jitter(x, rng):
    ...     return x + int(rng.integers(10))
    >>> list(map(jitter)([0, 0, 0])) == list(map(jitter)([0, 0, 0]))
    True

    If `fn` has a parameter named `rng` it gets a `numpy.random.Generator` of its own for each element, which depends
    on (seed, epoch, stage, index) alone. Otherwise `random`, `numpy.random` and torch are seeded around the unit that
    the element belongs to. Keeps length and random access. Holds nothing.
    """

    exact: ClassVar[bool] = True
    keeps_index: ClassVar[bool] = True

    def apply(self, x: Any, key: tuple[int, ...], context: Context) -> tuple[Any]:
        """See `Elementwise.apply`."""
        return (self.call(x, key, context),)

    def apply_all(self, xs: list[Any], origins: Origins, at: Positions, context: Context) -> list[Any]:
        """Call `fn` on many elements without a frame for each."""
        if self.wants_rng:
            return super().apply_all(xs, origins, at, context)
        return call_each(self.fn, xs, self, at)


@value
class filter(_Calling):
    """Keep the elements for which `fn` is true.

    >>> list(filter(lambda x: x is None)([1, None, 2]))
    [None]

    The result is a stream: its length is unknown. An element keeps its index, so what later stages draw for it does not
    depend on what was left out; `rng` as in `map`. In a pipeline with random access 32 elements are computed together,
    on a stream it holds nothing.
    """

    keeps_index: ClassVar[bool] = True

    def holds(self) -> str:
        """See `Stage.holds`."""
        return "up to 32 elements"

    def apply(self, x: Any, key: tuple[int, ...], context: Context) -> tuple[Any, ...]:
        """See `Elementwise.apply`."""
        return (x,) if self.call(x, key, context) else ()


@value
class flat_map(_Calling):
    """Apply `fn`, which returns an iterable, to each element and give the items one by one.

    >>> list(flat_map(lambda n: [n] * n)([2, 0, 1]))
    [2, 2, 1]

    Items are drawn as they are asked for, so `fn` may return a long or endless iterator; `rng` as in `map`. Holds
    nothing.
    """

    def apply(self, x: Any, key: tuple[int, ...], context: Context) -> Iterator[Any]:
        """See `Elementwise.apply`."""
        return iter(self.call(x, key, context))


@value
class unbatch(Elementwise):
    """Give the items of each element one by one: the inverse of `batch`.

    >>> list(unbatch()([[1, 2], [], [3]]))
    [1, 2, 3]

    Holds one element.
    """

    def holds(self) -> str:
        """See `Stage.holds`."""
        return "1 element"

    def apply(self, x: Any, key: tuple[int, ...], context: Context) -> Iterator[Any]:
        """See `Elementwise.apply`."""
        return iter(x)
