"""Other loaders on the workloads of `transport.py`: dataloader-rs and spdl-core, with the fastest collation each takes.

Both run the data set in threads of this process and hand over tensors made of one `np.stack` per field.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch


def stacked(samples: list[Any]) -> Any:
    """Collate with as few calls as possible, into tensors."""
    first = samples[0]
    if isinstance(first, dict):
        return {k: torch.from_numpy(np.stack([s[k] for s in samples])) for k in first}
    if isinstance(first, tuple):
        return tuple(torch.from_numpy(np.stack(column)) for column in zip(*samples, strict=True))
    return torch.from_numpy(np.stack(samples))


def peers_of(dataset: Any, batch_size: int, workers: int) -> dict[str, Callable[[], Iterable[Any]]]:
    """Return those that are installed."""
    found: dict[str, Callable[[], Iterable[Any]]] = {}
    if importlib.util.find_spec("dataloader_rs"):
        found["dataloader-rs"] = _dataloader_rs(dataset, batch_size, workers)
    if importlib.util.find_spec("spdl"):
        found["spdl"] = _spdl(dataset, batch_size, workers)
    return found


def _dataloader_rs(dataset: Any, batch_size: int, workers: int) -> Callable[[], Iterable[Any]]:
    import dataloader_rs

    class Wrapped(dataloader_rs.PyDataset):  # type: ignore[misc]  # it has no types
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, i: int) -> Any:
            return dataset[i]

    def epoch() -> Iterable[Any]:
        loader: Iterable[Any] = dataloader_rs.PyDataloader(
            Wrapped(), batch_size, num_workers=workers, collate_fn=stacked, prefetch_depth=2 * workers
        )
        return loader

    return epoch


def _spdl(dataset: Any, batch_size: int, workers: int) -> Callable[[], Iterable[Any]]:
    from spdl.pipeline import PipelineBuilder

    def fetch(indices: range) -> Any:
        return stacked([dataset[i] for i in indices])

    def epoch() -> Iterable[Any]:
        starts = range(0, len(dataset), batch_size)
        batches = [range(i, min(i + batch_size, len(dataset))) for i in starts]
        builder = PipelineBuilder().add_source(batches).pipe(fetch, concurrency=workers, output_order="input")
        pipeline = builder.add_sink(2 * workers).build(num_threads=workers)
        with pipeline.auto_stop():
            yield from pipeline

    return epoch
