"""How values compare and print: stages, sources and pipelines are values.

Laws: `==` returns a bool whatever the fields hold (arrays, NaN, objects whose own `==` raises); a `repr` is the code
that made the value, short, without memory addresses; equal values have equal hashes.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, dataclass_transform

import numpy as np

LONGEST_REPR = 80


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
def value[T](cls: type[T]) -> type[T]:
    """Make a frozen dataclass that compares and prints as `Value` does."""
    return dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)


class Value:
    """Compare by type and fields; print as the code that made it."""

    def __eq__(self, other: object) -> bool:
        return same(self, other)

    def __getstate__(self) -> dict[str, Any]:
        cached = functools.cached_property  # what is derived is derived again, and need not be picklable
        return {k: v for k, v in vars(self).items() if not isinstance(getattr(type(self), k, None), cached)}

    def __hash__(self) -> int:
        scalars = (v for v in _fields(self).values() if isinstance(v, (int, str, type(None))))
        return hash((type(self).__name__, *scalars))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(_arguments(self))})"


def _fields(x: Any) -> dict[str, Any]:
    return {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.compare}


def _arguments(x: Any) -> list[str]:
    """The arguments of the call that makes `x`; those left at their default are left out."""
    out, by_name = [], False
    for f in dataclasses.fields(x):
        v = getattr(x, f.name)
        if not f.init or not f.repr:
            continue
        if f.default is not dataclasses.MISSING and same(v, f.default):
            by_name = True
            continue
        out.append(f"{f.name}={show(v)}" if f.kw_only or by_name else show(v))
    return out


def show(x: Any) -> str:
    """Return code for `x` where it is short, and a description in angle brackets where it is not.

    >>> show([1, 2]), show(len), show(np.zeros((2, 3)))
    ('[1, 2]', 'len', '<ndarray 2x3 float64>')
    """
    if isinstance(x, Value):
        return repr(x)
    if isinstance(
        x, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, type)
    ):
        return _show_function(x)
    if isinstance(x, functools.partial):
        named = [f"{k}={show(v)}" for k, v in x.keywords.items()]
        return f"partial({', '.join([show(x.func), *[show(a) for a in x.args], *named])})"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"<{type(x).__name__} {'x'.join(str(int(n)) for n in x.shape)} {x.dtype}>"
    if isinstance(x, (str, bytes, int, float, complex, range, type(None))):
        return repr(x)
    if isinstance(x, (list, tuple, dict, set, frozenset)) and len(x) > LONGEST_REPR:
        return f"<{type(x).__name__} of {len(x)}>"
    text = repr(x)
    plain = " at 0x" in text or len(text) > LONGEST_REPR or "\n" in text
    return f"<{type(x).__name__}>" if plain else text


def _show_function(x: Any) -> str:
    name = getattr(x, "__qualname__", type(x).__name__)
    code = getattr(x, "__code__", None)
    if code is not None and "<" in name:
        return f"<{x.__name__.strip('<>')} at {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}>"
    return str(name)


def is_tensor(x: Any) -> bool:
    """Tell whether `x` is a torch tensor, without importing torch."""
    return any(cls.__module__ == "torch" and cls.__name__ == "Tensor" for cls in type(x).__mro__)


def same(a: Any, b: Any) -> bool:
    """Tell whether two values are equal; anything that cannot be compared is equal only to itself."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and _same_array(a, b)
    if isinstance(a, Value):
        return same(_fields(a), _fields(b))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)  # order counts: it is that of the elements
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, functools.partial):
        return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if is_tensor(a):
        return a.shape == b.shape and a.dtype == b.dtype and _same_tensor(a, b)
    try:
        return bool(a == b) or bool(a != a and b != b)  # NaN is NaN here
    except Exception:  # noqa: BLE001  # an `==` that raises or has no truth value: identity, tested above, decides
        return False


def _same_tensor(a: Any, b: Any) -> bool:
    try:
        return _same_array(a.detach().numpy(), b.detach().numpy())  # NaN equals NaN
    except (TypeError, RuntimeError):  # not a CPU tensor, or of a dtype that NumPy has not
        return bool(a.equal(b))


def _same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype.hasobject:
        return same(a.tolist(), b.tolist())
    return a.tobytes() == b.tobytes()
