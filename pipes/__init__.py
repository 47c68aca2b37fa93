"""Functional, composable data pipelines whose output never depends on how they are run."""

import typing

from pipes.batching import batch
from pipes.collating import collate, register_collate
from pipes.context import Context
from pipes.elements import filter, flat_map, map, unbatch
from pipes.errors import StageError, WorkerError, WorkerTimeoutError
from pipes.execution.loader import Loader, execute
from pipes.execution.shipment import share
from pipes.info import WorkerInfo, worker_info
from pipes.joining import concat, zip
from pipes.lines import from_lines
from pipes.ordering import enumerate, repeat, shuffle_buffer, skip, take
from pipes.orders import Order, sequential, shuffled, shuffled_subset, subset, weighted, with_replacement
from pipes.pinning import pin
from pipes.pipeline import Pipeline, pipe
from pipes.sampling import sample
from pipes.sharding import shard_by_rank, shard_by_worker
from pipes.sources import from_arrays, from_iterable, from_map
from pipes.stage import Block, Elementwise, Source, Stage

if typing.TYPE_CHECKING:
    from pipes.dataloader import DataLoader as DataLoader

__all__ = [
    "Block",
    "Context",
    "Elementwise",
    "Loader",
    "Order",
    "Pipeline",
    "Source",
    "Stage",
    "StageError",
    "WorkerError",
    "WorkerInfo",
    "WorkerTimeoutError",
    "batch",
    "collate",
    "concat",
    "enumerate",
    "execute",
    "filter",
    "flat_map",
    "from_arrays",
    "from_iterable",
    "from_lines",
    "from_map",
    "map",
    "pin",
    "pipe",
    "register_collate",
    "repeat",
    "sample",
    "sequential",
    "shard_by_rank",
    "shard_by_worker",
    "share",
    "shuffle_buffer",
    "shuffled",
    "shuffled_subset",
    "skip",
    "subset",
    "take",
    "unbatch",
    "weighted",
    "with_replacement",
    "worker_info",
    "zip",
]


def __getattr__(name: str) -> object:
    """Import `DataLoader` when it is asked for; it is not in `__all__`, so that `import *` needs no torch."""
    if name != "DataLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipes.dataloader import DataLoader

    return DataLoader
