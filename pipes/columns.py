"""Columns: samples kept column by column, so that a batch is one gather per column.

Laws: `Columns(...).rows()[i]` is what the source's i-th sample is; `take` is the gather of each column.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipes.values import Value, is_tensor, value


@value
class Columns(Value):
    """Arrays of equal first dimension; `names` makes rows dicts, `bare` makes a row the only column's item."""

    arrays: tuple[Any, ...]
    names: tuple[Any, ...] | None = None
    bare: bool = False

    def __len__(self) -> int:
        return len(self.arrays[0])

    def take(self, positions: npt.NDArray[np.int64]) -> Columns:
        """Gather the rows at `positions`."""
        return self.replaced([gather(a, positions) for a in self.arrays])

    def replaced(self, arrays: Sequence[Any]) -> Columns:
        """Return the same structure around other arrays."""
        return Columns(tuple(arrays), self.names, self.bare)

    def structure(self, values: Sequence[Any]) -> Any:
        """Return one value per column in the shape of a row: a tuple, a dict, or the bare value."""
        if self.bare:
            return values[0]
        return tuple(values) if self.names is None else dict(builtins.zip(self.names, values, strict=True))

    def rows(self) -> list[Any]:
        """Return the samples one by one; their arrays are views of the columns."""
        columns = builtins.map(list, self.arrays)
        if self.bare:
            return next(columns)
        rows = builtins.zip(*columns, strict=True)
        if self.names is None:
            return list(rows)
        return [dict(builtins.zip(self.names, row, strict=True)) for row in rows]


def gather(array: Any, positions: npt.NDArray[np.int64]) -> Any:
    """Index an array or a tensor along its first dimension by an array of positions."""
    if isinstance(array, np.ndarray):
        return np.asarray(array).take(positions, 0)  # a third of array[positions]'s cost; of a memmap a plain array
    import torch  # a column that is no array is a tensor, so torch is imported already

    index = torch.from_numpy(positions).to(array.device)
    return array.index_select(0, index)  # no threads, which array[positions] wakes


def stacks(array: Any) -> bool:
    """Tell whether a column's gather is what stacking its items gives: numbers in the machine's byte order, tensors."""
    return is_tensor(array) or (array.dtype.kind in "biufc" and array.dtype.isnative) or array.ndim > 1


def joined(parts: Sequence[Columns]) -> Columns:
    """Put columns of the same structure one below the other."""
    return parts[0].replaced([_concatenate(arrays) for arrays in builtins.zip(*[p.arrays for p in parts], strict=True)])


def _concatenate(arrays: Sequence[Any]) -> Any:
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import torch  # see `gather`

    return torch.cat(list(arrays))


def columns_of(dataset: Any) -> Columns | None:
    """Return a data set's columns where its samples are known to be their rows: an array, a tensor, a `TensorDataset`.

    Not those of a subclass of `TensorDataset`, whose `__getitem__` may do anything.
    """
    if isinstance(dataset, np.ndarray) or is_tensor(dataset):
        return Columns((dataset,), bare=True)
    if type(dataset) is getattr(sys.modules.get("torch.utils.data"), "TensorDataset", None):
        return Columns(tuple(dataset.tensors)) if all(builtins.map(is_tensor, dataset.tensors)) else None
    return None
