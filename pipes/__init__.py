"""Functional, composable data pipelines whose output never depends on how they are run."""

from pipes.batching import batch
from pipes.collating import collate, register_collate
from pipes.context import Context
from pipes.elements import filter, flat_map, map, unbatch
from pipes.errors import StageError
from pipes.joining import concat, zip
from pipes.ordering import enumerate, repeat, sample, shuffle_buffer, skip, take
from pipes.orders import Order, sequential, shuffled, shuffled_subset, subset, weighted, with_replacement
from pipes.pinning import pin
from pipes.pipeline import Pipeline, pipe
from pipes.sharding import shard_by_rank, shard_by_worker
from pipes.sources import Source, from_arrays, from_iterable, from_map
from pipes.stage import Block, Elementwise, Stage

__all__ = [
    "Block",
    "Context",
    "Elementwise",
    "Order",
    "Pipeline",
    "Source",
    "Stage",
    "StageError",
    "batch",
    "collate",
    "concat",
    "enumerate",
    "filter",
    "flat_map",
    "from_arrays",
    "from_iterable",
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
    "shuffle_buffer",
    "shuffled",
    "shuffled_subset",
    "skip",
    "subset",
    "take",
    "unbatch",
    "weighted",
    "with_replacement",
    "zip",
]
