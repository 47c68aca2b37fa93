"""Sources: where a pipeline's elements come from.

Laws: `from_map` has random access and asks the dataset for a whole batch at once where it can; `from_iterable` is a
stream, iterated afresh for each run; a source never changes what it was given.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipes.columns import Columns, columns_of, stacks
from pipes.context import Context
from pipes.errors import StageError, call_each
from pipes.nodes import Drawing, Indexed, Node, OneShot, Positions
from pipes.packed import Packed
from pipes.stage import Source, Stage, takes_rng
from pipes.values import is_tensor, show, value

PLAIN = (list, tuple, dict, str, bytes, range, np.ndarray, Packed)


@value
class from_map(Source):
    """Read anything that has `__getitem__` and `__len__`.

    >>> from pipes import pipe
    >>> list(pipe(from_map({"a": 1, "b": None})))
    [1, None]
    >>> list(pipe(from_map({"a": 1, "b": 2, "c": 3}, keys=["c", "a"])))
    [3, 1]

    Lists, arrays, memmaps, dicts (in the order of their keys), torch and Hugging Face datasets. `keys` gives the keys
    where they are not 0..n-1. A dataset gets plain ints, and a list of them through `__getitems__` if it has that; not
    if a subclass overrides only `__getitem__`. Draws from the global generators in `__getitem__` are seeded.
    """

    dataset: Any
    keys: Any = None

    def __post_init__(self) -> None:
        for method in ("__getitem__", "__len__"):
            if isinstance(self.dataset, builtins.type) or not hasattr(self.dataset, method):
                raise TypeError(
                    f"`dataset` must have __getitem__ and __len__, got {self.dataset!r} of type "
                    f"{builtins.type(self.dataset).__name__}; use from_iterable for a stream"
                )
        if isinstance(self.dataset, Stage):
            raise TypeError(f"`dataset` must be data, got the stage {self.dataset!r}; pass it to pipe after a source")
        if self.keys is not None and not (hasattr(self.keys, "__getitem__") and hasattr(self.keys, "__len__")):
            object.__setattr__(self, "keys", list(self.keys))

    def bind(self, context: Context) -> Indexed:
        """See `Source.bind`."""
        dataset, keys = self.dataset, self.keys
        user = type(dataset) not in PLAIN and not isinstance(dataset, np.ndarray) and not is_tensor(dataset)
        if keys is None and isinstance(dataset, Mapping):
            keys = list(dataset)
        if keys is None and (columns := columns_of(dataset)) is not None:
            return _of_columns(columns, context)  # gathered: its rows are no views of the data
        n = len(dataset) if keys is None else len(keys)
        get = self._bulk(dataset) if user and _has_bulk_access(dataset) else self._each(dataset)
        if keys is None:
            return Indexed(n, lambda positions: get(positions.tolist(), positions), context, user=user)

        def fetch(positions: Positions) -> list[Any]:
            return get([_plain(keys[p]) for p in positions.tolist()], positions)

        return Indexed(n, fetch, context, user=user)

    def _each(self, dataset: Any) -> Callable[[list[Any], Positions], list[Any]]:
        def get(keys: list[Any], positions: Positions) -> list[Any]:
            try:
                return call_each(dataset.__getitem__, keys, self, positions)
            except IndexError as error:
                error.add_note(f"pipes: the dataset's length is said to be {len(dataset)}; does its __len__ lie?")
                raise

        return get

    def _bulk(self, dataset: Any) -> Callable[[list[Any], Positions], list[Any]]:
        def get(keys: list[Any], _: Positions) -> list[Any]:
            try:
                samples = list(dataset.__getitems__(keys))
            except StopIteration as error:
                raise StageError(f"{self!r} raised StopIteration for keys {keys[:8]}") from error
            except Exception as error:
                error.add_note(f"pipes: in {self!r}, keys {keys[:8]}{' ...' if len(keys) > 8 else ''}")
                raise
            if len(samples) != len(keys):
                raise StageError(
                    f"{self!r}: __getitems__ must return one sample per key, got {len(samples)} for {len(keys)} keys"
                )
            return samples

        return get


def _plain(key: Any) -> Any:
    return operator.index(key) if isinstance(key, np.integer) else key


def _has_bulk_access(dataset: Any) -> bool:
    """Tell whether `__getitems__` can be trusted: a subclass that overrides only `__getitem__` means its own."""

    def defined(method: str) -> int | None:
        order = builtins.type(dataset).__mro__
        return next((i for i, cls in builtins.enumerate(order) if method in vars(cls)), None)

    bulk, single = defined("__getitems__"), defined("__getitem__")
    return callable(getattr(dataset, "__getitems__", None)) and bulk is not None and (single is None or bulk <= single)


@value
class from_iterable(Source):
    """Read a stream: any iterable, or a function without arguments that makes one for each run.

    >>> from pipes import pipe
    >>> list(pipe(from_iterable(lambda: (n * n for n in range(3)))))
    [0, 1, 4]
    >>> once = pipe(from_iterable(iter("ab")))
    >>> list(once), list(once)
    Traceback (most recent call last):
    pipes.errors.StageError: from_iterable(<str_ascii_iterator>) is a one-shot iterator and was run already; ...

    If the function has a parameter named `rng` it gets one `numpy.random.Generator` per run (and shard); a stream that
    draws should use it, since the global generators are not seeded for it. A one-shot iterator runs once. Holds
    nothing.
    """

    iterable: Any

    def __post_init__(self) -> None:
        x = self.iterable
        if isinstance(x, (Stage, builtins.type)):
            raise TypeError(f"`iterable` must be an iterable or a function that makes one, got {x!r}")
        if not hasattr(x, "__iter__") and not callable(x):
            advice = "use from_map" if hasattr(x, "__getitem__") else "pass a list, a generator function or the like"
            raise TypeError(f"`iterable` must be an iterable or a function that makes one, got {x!r}; {advice}")
        if hasattr(x, "__iter__") and hasattr(x, "__next__"):
            object.__setattr__(self, "iterable", OneShot(x))

    @property
    def one_shot(self) -> bool:
        """Whether it can be run only once."""
        return isinstance(self.iterable, OneShot)

    def bind(self, context: Context) -> Node:
        """See `Source.bind`."""
        return Drawing(self._open, context.at(name="source"), self)

    def _open(self, context: Context) -> Iterable[Any]:
        if isinstance(self.iterable, OneShot):
            return self.iterable.take(self)
        if hasattr(self.iterable, "__iter__"):
            return self.iterable  # type: ignore[no-any-return]  # just tested
        made = self.iterable(rng=context.rng((0,))) if takes_rng(self.iterable) else self.iterable()
        if not hasattr(made, "__iter__"):
            raise TypeError(f"{self!r} must make an iterable, got {made!r}")
        return made  # type: ignore[no-any-return]  # just tested


@value
class from_arrays(Source):
    """Read columns: arrays or tensors of equal first dimension, or a mapping of names to such.

    >>> from pipes import pipe
    >>> list(pipe(from_arrays({"x": np.arange(2), "y": np.array([5.0, 6.0])})))
    [{'x': np.int64(0), 'y': np.float64(5.0)}, {'x': np.int64(1), 'y': np.float64(6.0)}]
    >>> list(pipe(from_arrays(np.arange(2))))
    [(np.int64(0),), (np.int64(1),)]

    Rows are tuples, or dicts where names were given. A batch that goes to `collate` is gathered with one call per
    column, and no row is ever made.
    """

    columns: Columns

    def __init__(self, *arrays: Any) -> None:
        named = arrays[0] if len(arrays) == 1 and isinstance(arrays[0], Mapping) else None
        values = tuple(arrays if named is None else named.values())
        if not values:
            raise ValueError("from_arrays needs at least one array, got none")
        labels: Sequence[Any] = builtins.range(len(values)) if named is None else list(named)
        for label, array in builtins.zip(labels, values, strict=True):
            if not (isinstance(array, np.ndarray) or is_tensor(array)) or not array.shape:
                raise TypeError(f"column {label!r} must be an array with a first dimension, got {show(array)}")
        lengths = {label: len(a) for label, a in builtins.zip(labels, values, strict=True)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns must have equal lengths, got {lengths}; cut them to the same first dimension")
        object.__setattr__(self, "columns", Columns(values, None if named is None else tuple(named)))

    def __repr__(self) -> str:
        c = self.columns
        if c.names is None:
            return f"from_arrays({', '.join(builtins.map(show, c.arrays))})"
        return f"from_arrays({show(c.structure(c.arrays))})"

    def bind(self, context: Context) -> Indexed:
        """See `Source.bind`."""
        return _of_columns(self.columns, context)


def _of_columns(columns: Columns, context: Context) -> Indexed:
    """Random access to columns, row by row and column by column."""
    take = columns.take
    whole = take if all(stacks(a) for a in columns.arrays) else None
    return Indexed(len(columns), lambda positions: take(positions).rows(), context, columns=whole)


def as_source(x: Any) -> Source:
    """Return what a user gave as the first argument of `pipe` as a source."""
    if isinstance(x, Source):
        return x
    if isinstance(x, Stage) or (isinstance(x, builtins.type) and issubclass(x, (Stage, Source))):
        raise TypeError(f"the first argument of pipe must be a source, got {x!r}; put from_map(...) before it")
    streams = any(cls.__name__ == "IterableDataset" for cls in builtins.type(x).__mro__)  # torch's has a __getitem__
    if hasattr(x, "__getitem__") and hasattr(x, "__len__") and not isinstance(x, builtins.type) and not streams:
        return from_map(x)
    if hasattr(x, "__iter__") and not isinstance(x, builtins.type):
        return from_iterable(x)
    advice = "wrap it: from_iterable(...)" if callable(x) else "pass a sequence, an iterable or a source"
    kind = builtins.type(x).__name__
    raise TypeError(f"the first argument of pipe must be a source, got {show(x)} of type {kind}; {advice}")
