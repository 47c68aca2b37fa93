"""`collate`: a list of samples into one batch of arrays.

Laws: the structure of a sample is the structure of the batch; sample i is row i of every leaf; nothing is dropped: a
key, shape or type that differs between samples is an error that names the key path, the sample and both.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib.util
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from pipes.context import Context
from pipes.errors import call_each, check_callable, check_choice
from pipes.nodes import Indexed, Positions
from pipes.stage import Elementwise, Origins
from pipes.structures import rebuilt
from pipes.values import is_tensor, show, value

type Empty = Callable[..., np.ndarray[Any, Any]]
type Collator = Callable[[list[Any]], Any]

_REGISTRY: dict[type, Collator] = {}


def register_collate(cls: type, fn: Collator) -> None:
    """Collate samples of type `cls`, and of its subclasses, with `fn(samples)`.

    >>> from fractions import Fraction
    >>> register_collate(Fraction, lambda samples: np.array([float(s) for s in samples]))
    >>> list(collate(to="numpy")([[Fraction(1, 2), Fraction(1, 4)]]))
    [array([0.5 , 0.25])]

    Goes before the built-in rules, in every pipeline of this program and its workers. `fn` gets a list of samples.
    """
    if not isinstance(cls, type):
        raise TypeError(f"`cls` must be a class, got {cls!r}")
    _REGISTRY[cls] = check_callable("fn", fn)
    _kind.cache_clear()


def registered() -> dict[type, Collator]:
    """Return the registered rules, for a worker to register too."""
    return dict(_REGISTRY)


@value
class collate(Elementwise):
    """Turn each list of samples into one batch of arrays.

    >>> list(collate(to="numpy")([[(1, "a"), (2, "b")]]))
    [(array([1, 2]), ['a', 'b'])]
    >>> list(collate(sum)([[1, 2], [3]]))
    [3, 3]

    Mappings, named tuples, dataclasses, lists and tuples keep their structure; arrays, tensors and numbers are stacked
    along a new first dimension, with the types of torch's `default_collate`: float64 from Python floats, int64 from
    ints; `str`, `bytes`, `None` and unknown objects stay a list. `to` is "torch" or "numpy". `register_collate` adds
    rules by type; `fn(samples)` replaces them all, for example to pad::

        def padded(samples):
            out = np.zeros((len(samples), max(map(len, samples))))
            for row, sample in zip(out, samples):
                row[: len(sample)] = sample
            return out

    Differing keys, shapes, dtypes or types are a `ValueError` or a `TypeError`. Keeps random access. Holds one batch.
    """

    fn: Collator | None = None
    to: str = field(default="torch", kw_only=True)
    exact: ClassVar[bool] = True
    keeps_index: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.fn is not None:
            check_callable("fn", self.fn)
        check_choice("to", self.to, ("torch", "numpy"))
        if self.fn is None and self.to == "torch" and importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError('`to="torch"` needs torch, which is not installed; pass to="numpy" or install it')

    @property
    def draws(self) -> bool:
        """Only a function of the user's may draw."""
        return self.fn is not None

    def holds(self) -> str:
        """See `Stage.holds`."""
        return "1 batch"

    def apply(self, x: Any, key: tuple[int, ...], context: Context) -> tuple[Any]:
        """See `Elementwise.apply`."""
        return (self._collated(x, context),)

    def apply_all(self, xs: list[Any], origins: Origins, at: Positions, context: Context) -> list[Any]:
        """See `Elementwise.apply_all`."""
        return call_each(lambda x: self._collated(x, context), xs, self, at)

    def indexed(self, node: Indexed, context: Context) -> Indexed:
        """See `Elementwise.indexed`: columns below are gathered, and no row is made."""
        groups = node.groups
        if groups is None or self.fn is not None or _has_rules_for_arrays():
            return super().indexed(node, context)

        def fetch(positions: Positions) -> list[Any]:
            return [self._finished(c.structure(c.arrays), context) for c in groups(positions)]

        return Indexed(node.n, fetch, context, user=node.user, origin=node.origin)

    def _collated(self, samples: Any, context: Context) -> Any:
        if self.fn is not None:
            return self.fn(samples)
        if isinstance(samples, (str, bytes)) or not isinstance(samples, Sequence):
            raise TypeError(f"collate needs a list of samples, got {show(samples)}; put batch(size) before it")
        if not samples:
            raise ValueError("collate needs at least one sample, got an empty list")
        return self._finished(_collate(list(samples), "", context.empty), context)

    def _finished(self, batch: Any, context: Context) -> Any:
        if self.to == "numpy":
            return _converted(batch, _to_array)
        deferred = context.deferred and context.deferred == context.name
        return _converted(batch, _deferred if deferred else _to_tensor)


def _has_rules_for_arrays() -> bool:
    """Whether a registered class applies to the columns' items, which then must go through its rule."""
    return any(issubclass(c, (np.ndarray, np.generic)) or c is object or c.__module__ == "torch" for c in _REGISTRY)


class Deferred:
    """An array that becomes a tensor where it is unpickled, so that a worker need not import torch."""

    def __init__(self, array: Any, path: str) -> None:
        self._array, self._path = array, path

    def __reduce__(self) -> tuple[Any, ...]:
        return _to_tensor, (self._array, self._path)


def _deferred(leaf: Any, path: str) -> Any:
    return Deferred(leaf, path) if isinstance(leaf, np.ndarray) else leaf


def _collate(samples: list[Any], path: str, empty: Empty) -> Any:
    types: set[Any] = set(builtins.map(type, samples))
    first: Any = type(samples[0])
    kind = _kind(first)
    if len(types) > 1 and (strangers := {cls for cls in types if _kind(cls) != kind}):
        other = next(i for i, s in builtins.enumerate(samples) if type(s) in strangers)
        raise TypeError(
            f"samples of a batch must agree in type{_at(path)}, got {type(samples[0]).__name__} in sample 0 "
            f"and {type(samples[other]).__name__} in sample {other}; convert them, or pass collate your own fn"
        )
    return _RULES[kind](samples, path, empty) if isinstance(kind, str) else _REGISTRY[kind](samples)


@lru_cache(maxsize=1024)
def _kind(cls: Any) -> str | type:
    """What rule a type falls under: a registered class, or a name of `_RULES`."""
    registered: type | None = next((base for base in cls.__mro__ if base in _REGISTRY), None)
    if registered is not None:
        return registered
    if issubclass(cls, (str, bytes)) or cls is type(None):
        return "list"
    if issubclass(cls, np.ndarray):
        return "masked" if issubclass(cls, np.ma.MaskedArray) else "array"
    if issubclass(cls, (bool, int, float, complex, np.bool_, np.number)):
        return "number"
    if issubclass(cls, Mapping):
        return "mapping"
    if issubclass(cls, tuple):
        return "namedtuple" if hasattr(cls, "_fields") else "sequence"
    if issubclass(cls, list):
        return "sequence"
    if dataclasses.is_dataclass(cls):
        return "dataclass"
    if any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in cls.__mro__):
        return "tensor"
    return "list"


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _uniform(samples: list[Any], path: str, what: str, of: Callable[[Any], Any], advice: str) -> Any:
    """Return what all samples share, or raise an error that names the first that differs."""
    found = list(builtins.map(of, samples))
    if len(set(found)) == 1:
        return found[0]
    other = next(i for i, value in builtins.enumerate(found) if value != found[0])
    raise ValueError(
        f"samples of a batch must agree in {what}{_at(path)}, got {_plain(found[0])} in sample 0 "
        f"and {_plain(found[other])} in sample {other}; {advice}"
    )


def _plain(x: Any) -> Any:
    """A shape as a tuple, keys as a set: as a reader knows them."""
    return tuple(x) if isinstance(x, tuple) else set(x) if isinstance(x, frozenset) else x


SHAPE, DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")
PAD = "pad them to one shape in map, or pass collate your own fn"
CAST = "cast them to one dtype in map"


def _arrays(samples: list[Any], path: str, empty: Empty) -> Any:
    shape = _uniform(samples, path, "shape", SHAPE, PAD)
    dtype = samples[0].dtype
    out = np.empty((len(samples), *shape), dtype) if dtype.hasobject else empty((len(samples), *shape), dtype)
    try:
        if out.size and shape:  # what np.stack does, at a fifth of its cost
            np.concatenate(samples, out=out.reshape(-1, *shape[1:]), casting="no")
        else:
            np.stack(samples, out=out, casting="no")
    except TypeError:
        _uniform(samples, path, "dtype", DTYPE, CAST)  # words the error; to ask each sample first costs as much as this
        raise
    return out


def _masked(_: list[Any], path: str, __: Empty) -> Any:
    raise TypeError(f"a masked array would lose its mask{_at(path)}; fill it in map, or pass collate your own fn")


def _tensors(samples: list[Any], path: str, _: Empty) -> Any:
    import torch  # samples are tensors, so torch is imported already

    _uniform(samples, path, "dtype", DTYPE, CAST)
    try:
        return torch.stack(samples)
    except RuntimeError:
        _uniform(samples, path, "shape", SHAPE, PAD)  # words the error; asking each tensor first costs as much as this
        raise


def _numbers(samples: list[Any], path: str, _: Empty) -> Any:
    alone = len(set(builtins.map(type, samples))) == 1  # then their dtypes need not be compared
    dtype = _dtype_of_number(samples[0]) if alone else _uniform(samples, path, "dtype", _dtype_of_number, CAST)
    try:
        return np.array(samples, dtype)
    except OverflowError as error:
        raise OverflowError(f"an int must fit 64 bits{_at(path)}; collate it as a float or a str") from error


def _dtype_of_number(x: Any) -> np.dtype[Any]:
    if isinstance(x, np.generic):
        return x.dtype
    kind = next(t for t in (bool, int, float, complex) if isinstance(x, t))
    return _PYTHON_DTYPES[kind]


_PYTHON_DTYPES = {bool: np.dtype(bool), int: np.dtype("int64"), float: np.dtype(float), complex: np.dtype(complex)}


def _mappings(samples: list[Any], path: str, empty: Empty) -> Any:
    first = samples[0]
    keys = _uniform(samples, path, "keys", frozenset, "fill the missing keys in map")
    columns = {k: _collate([m[k] for m in samples], f"{path}[{k!r}]", empty) for k in first if k in keys}
    return rebuilt(first, columns)


def _sequences(samples: list[Any], path: str, empty: Empty) -> Any:
    try:
        fields = list(builtins.zip(*samples, strict=True))
    except ValueError:
        _uniform(samples, path, "length", len, PAD)  # words the error
        raise
    columns = [_collate(list(field), f"{path}[{i}]", empty) for i, field in builtins.enumerate(fields)]
    return rebuilt(samples[0], tuple(columns) if isinstance(samples[0], tuple) else columns)


def _namedtuples(samples: list[Any], path: str, empty: Empty) -> Any:
    cls = _uniform(samples, path, "type", type, "use one class")
    return cls(*[_collate([getattr(s, f) for s in samples], f"{path}.{f}", empty) for f in cls._fields])


def _dataclasses(samples: list[Any], path: str, empty: Empty) -> Any:
    cls = _uniform(samples, path, "type", type, "use one class")
    names = [f.name for f in dataclasses.fields(cls) if f.init]
    return cls(**{f: _collate([getattr(s, f) for s in samples], f"{path}.{f}", empty) for f in names})


_RULES: dict[str, Callable[[list[Any], str, Empty], Any]] = {
    "array": _arrays,
    "masked": _masked,
    "tensor": _tensors,
    "number": _numbers,
    "mapping": _mappings,
    "sequence": _sequences,
    "namedtuple": _namedtuples,
    "dataclass": _dataclasses,
    "list": lambda samples, *_: samples,
}


def _converted(batch: Any, leaf: Callable[[Any, str], Any], path: str = "") -> Any:
    """Convert every array and tensor of a batch, in the structure that `_collate` built."""
    if isinstance(batch, np.ndarray) or (is_tensor(batch)):
        return leaf(batch, path)
    if isinstance(batch, Mapping):
        return rebuilt(batch, {k: _converted(v, leaf, f"{path}[{k!r}]") for k, v in batch.items()})
    if isinstance(batch, (list, tuple)):
        items = [_converted(v, leaf, f"{path}[{i}]") for i, v in builtins.enumerate(batch)]
        return rebuilt(batch, tuple(items) if isinstance(batch, tuple) else items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _converted_fields(batch, leaf, path)
    return batch


def _converted_fields(batch: Any, leaf: Callable[[Any, str], Any], path: str) -> Any:
    names = [f.name for f in dataclasses.fields(batch) if f.init]
    return dataclasses.replace(batch, **{f: _converted(getattr(batch, f), leaf, f"{path}.{f}") for f in names})


def _to_tensor(leaf: Any, path: str) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    import torch  # only a pipeline that asks for tensors needs torch

    try:
        return torch.from_numpy(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(f'torch has no dtype {leaf.dtype}{_at(path)}; convert it in map, or pass to="numpy"') from error


def _to_array(leaf: Any, path: str) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    try:
        return leaf.numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f'NumPy cannot hold a tensor of {leaf.dtype}{_at(path)}: {error}; pass to="torch"') from error
