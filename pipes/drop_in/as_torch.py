"""Pipelines and loaders as torch's `IterableDataset`, for what takes nothing else.

Laws: torch's DataLoader with `batch_size=None` gives what iterating the pipeline gives, for any number of its workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from pipes.execution.loader import Loader
from pipes.pipeline import Pipeline, pipe
from pipes.sharding import shard_by_rank


class PipelineDataset(IterableDataset[Any]):
    """The outputs of a pipeline; worker i of n gives every n-th of them, from the i-th on."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next `iter`, since torch itself never tells a data set the epoch."""
        self.pipeline = self.pipeline.at_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return iter(self.pipeline)
        return iter(pipe(self.pipeline, shard_by_rank(worker.id, worker.num_workers)))

    def __len__(self) -> int:
        return len(self.pipeline)


class LoaderDataset(IterableDataset[Any]):
    """The outputs of a loader, whose own workers compute them: each `iter` is its next epoch."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter` runs."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise RuntimeError("a Loader has workers of its own; pass torch's DataLoader num_workers=0")
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)
