"""A long list as one buffer of pickles with offsets.

N processes share one copy of it, and reading it touches no reference counts: a Python list of small objects costs N
copies in N forked workers. Laws: `Packed.pack(xs)[i]` equals `xs[i]`, as a fresh object at each access.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LONG = 10_000
SAMPLE = 256


class Packed(Sequence[Any]):
    """A list in a worker's place for one: reads unpickle an item, and what else a list can do makes it a real list.

    `isinstance(x, list)` is true, `+` and `==` are a list's; only `type(x) is list` is not. Each read of an item is a
    fresh object, so a change made to an item is not kept.
    """

    def __init__(self, data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self.data, self.ends = data, ends
        self._items: list[Any] | None = None  # once something was asked of it that only a list can do

    @classmethod
    def pack(cls, items: Sequence[Any]) -> Packed:
        """Pickle each item by itself."""
        file = io.BytesIO()
        ends = np.zeros(len(items) + 1, np.int64)
        for i, item in enumerate(items, 1):
            pickle.dump(item, file, 5)  # a pickler for each, so that no item refers to another
            ends[i] = file.tell()
        return cls(np.frombuffer(file.getbuffer(), np.uint8), ends)

    @property  # type: ignore[misc]  # mypy holds it for writable
    def __class__(self) -> Any:
        """What `isinstance` sees."""
        return list

    def __len__(self) -> int:
        return len(self.ends) - 1 if self._items is None else len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if self._items is not None:
            return self._items[index]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = operator.index(index)
        i = i + len(self) if i < 0 else i
        if not 0 <= i < len(self):
            raise IndexError("list index out of range")
        return pickle.loads(self.data[self.ends[i] : self.ends[i + 1]])

    def _listed(self) -> list[Any]:
        if self._items is None:
            self._items = list(self)
        return self._items

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._listed(), name)  # append, sort, copy and the like

    def __reduce__(self) -> Any:
        return list, (list(self),)

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, Packed) else other)

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __repr__(self) -> str:
        return repr(list(self))

    def __setitem__(self, index: Any, item: Any) -> None:
        self._listed()[index] = item

    def __delitem__(self, index: Any) -> None:
        del self._listed()[index]

    def __add__(self, other: Any) -> list[Any]:
        return list(self) + list(other) if isinstance(other, list) else NotImplemented

    def __radd__(self, other: Any) -> list[Any]:
        return other + list(self) if isinstance(other, list) else NotImplemented

    def __iadd__(self, other: Any) -> Packed:
        self._listed().extend(other)
        return self

    def __mul__(self, times: Any) -> list[Any]:
        return [*self] * int(times)

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> bool:
        return list(self) < list(other)

    def __le__(self, other: Any) -> bool:
        return list(self) <= list(other)

    def __gt__(self, other: Any) -> bool:
        return list(self) > list(other)

    def __ge__(self, other: Any) -> bool:
        return list(self) >= list(other)


def worth_packing(items: list[Any]) -> bool:
    """Tell whether a list is long, and its items pickle alone and do not share what they hold.

    Items that share an array, say, would each get their own copy of it: compare a sample pickled jointly and alone.
    """
    if len(items) < LONG:
        return False
    sample = items[:: max(1, len(items) // SAMPLE)]
    if all(type(item) in (int, float, bool, type(None)) for item in sample):
        return False  # as small pickled as not, and slower
    try:
        alone = sum(len(pickle.dumps(item, 5)) for item in sample)
        return alone <= 1.5 * len(pickle.dumps(sample, 5)) + 64 * len(sample)
    except Exception:  # noqa: BLE001  # items that plain pickle cannot carry go with the rest of the pipeline
        return False
