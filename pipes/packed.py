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
    """A read-only sequence that unpickles an item each time it is asked for."""

    def __init__(self, data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self.data, self.ends = data, ends

    @classmethod
    def pack(cls, items: Sequence[Any]) -> Packed:
        """Pickle each item by itself."""
        file = io.BytesIO()
        ends = np.zeros(len(items) + 1, np.int64)
        for i, item in enumerate(items, 1):
            pickle.dump(item, file, 5)  # a pickler for each, so that no item refers to another
            ends[i] = file.tell()
        return cls(np.frombuffer(file.getbuffer(), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = operator.index(index)
        i = i + len(self) if i < 0 else i
        if not 0 <= i < len(self):
            raise IndexError("list index out of range")
        return pickle.loads(self.data[self.ends[i] : self.ends[i + 1]])


def worth_packing(items: list[Any]) -> bool:
    """Tell whether a list is long, and its items pickle alone and do not share what they hold.

    Items that share an array, say, would each get their own copy of it: compare a sample pickled jointly and alone.
    """
    if len(items) < LONG:
        return False
    sample = items[:: max(1, len(items) // SAMPLE)]
    try:
        alone = sum(len(pickle.dumps(item, 5)) for item in sample)
        return alone <= 1.5 * len(pickle.dumps(sample, 5)) + 64 * len(sample)
    except Exception:  # noqa: BLE001  # items that plain pickle cannot carry go with the rest of the pipeline
        return False
