"""`pin`: tensors into page-locked memory, from where an accelerator copies them without waiting.

Laws: the structure is kept; nothing but tensors and objects with `pin_memory` changes; without an accelerator the very
same object is passed on.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from pipes.context import Context
from pipes.stage import Elementwise
from pipes.structures import rebuilt
from pipes.values import value


@value
class pin(Elementwise):
    """Pin the memory of every tensor, in any structure, and call `pin_memory()` of custom types.

    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):
    ...     list(pin()([1, {"a": "b"}]))
    [1, {'a': 'b'}]

    Runs in the consumer, never in a worker: what follows it does too. One-to-one stages after it keep random access.
    With no accelerator (or no torch) it warns once and passes data through. Holds 1 batch.
    """

    exact: ClassVar[bool] = True
    keeps_index: ClassVar[bool] = True
    consumer: ClassVar[bool] = True

    def holds(self) -> str:
        """See `Stage.holds`."""
        return "1 batch"

    def apply(self, x: Any, key: tuple[int, ...], context: Context) -> tuple[Any]:
        """See `Elementwise.apply`."""
        return (pinned(x) if _can_pin() else x,)


@cache
def _can_pin() -> bool:
    """Whether there is an accelerator; warns, once a process, where there is none."""
    if importlib.util.find_spec("torch") is not None:
        import torch  # only a pipeline that pins needs torch

        if torch.accelerator.is_available():
            return True
    warnings.warn("pin() found no accelerator and passes its data through unchanged", stacklevel=2)
    return False


def pinned(x: Any) -> Any:
    """Return `x` with every tensor in it pinned."""
    if isinstance(x, (str, bytes, type)):
        return x
    if hasattr(x, "pin_memory"):
        return x.pin_memory()
    if isinstance(x, Mapping):
        return rebuilt(x, {k: pinned(v) for k, v in x.items()})
    if isinstance(x, (list, tuple)):
        return rebuilt(x, (tuple if isinstance(x, tuple) else list)(map(pinned, x)))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **{f.name: pinned(getattr(x, f.name)) for f in dataclasses.fields(x) if f.init})
    return x
