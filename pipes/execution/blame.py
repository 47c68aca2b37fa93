"""Find which part of a pipeline cannot be serialised, and word the error."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from pipes.execution.plan import Plan
from pipes.execution.shipment import freeze

DEPTH = 8


def unpicklable(plan: Plan, init: Any, error: Exception) -> str:
    """Say which stage cannot be sent to a worker, and which attribute of it is the cause."""
    parts = [] if plan.part is None else [plan.part.source, *plan.part.stages]
    for part in [*parts, init]:
        if _fails(part):
            path, culprit = _deepest(part, "", DEPTH)
            where = f"{part!r}{f', at {path}' if path else ''}"
            return (
                f"{where} cannot be sent to a worker: {type(culprit).__name__} object: {error}; make it inside the "
                "function that uses it (say, at its first call), or use workers=0 or backend='thread'"
            )
    return f"the pipeline cannot be sent to a worker: {error}"


def _fails(x: Any) -> bool:
    try:
        freeze(x)
    except Exception:  # noqa: BLE001  # whatever it is, it is the answer
        return True
    return False


def _deepest(x: Any, path: str, depth: int) -> tuple[str, Any]:
    """Follow attributes, items and closures to the smallest part that fails."""
    for name, part in _parts(x):
        if depth and _fails(part):
            return _deepest(part, path + name, depth - 1)
    return path, x


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, types.FunctionType):
        names = x.__code__.co_freevars
        yield from ((f".<{n}>", c.cell_contents) for n, c in zip(names, x.__closure__ or ()))
        yield from ((f".<{n}>", x.__globals__[n]) for n in x.__code__.co_names if n in x.__globals__)
    elif isinstance(x, types.MethodType):
        yield ".__self__", x.__self__
    elif isinstance(x, dict):
        yield from ((f"[{k!r}]", v) for k, v in x.items())
    elif isinstance(x, (list, tuple)):
        yield from ((f"[{i}]", v) for i, v in enumerate(x))
    else:
        yield from ((f".{k}", v) for k, v in getattr(x, "__dict__", {}).items())
