"""Rebuild a container around other contents, in its own type.

Laws: a subclass with extra state (a `defaultdict`, say) keeps it; what cannot be rebuilt becomes the plain container.
"""

from __future__ import annotations

import copy
from typing import Any


def rebuilt(original: Any, plain: Any) -> Any:
    """Return `plain` (a dict, list or tuple) in the type of `original`."""
    cls = type(original)
    if cls is type(plain):
        return plain
    if isinstance(plain, tuple):
        return cls(*plain) if hasattr(original, "_fields") else _made(cls, plain)
    try:
        clone = copy.copy(original)
        clone.clear()
        clone.update(plain) if isinstance(plain, dict) else clone.extend(plain)
    except (AttributeError, TypeError):  # read-only, or no copy to be had
        return _made(cls, plain)
    return clone


def _made(cls: Any, plain: Any) -> Any:
    try:
        return cls(plain)
    except TypeError:
        return plain
