"""`worker_info`: where user code is running.

Laws: inside a run it tells the worker and the run, the same for every element of one shard; outside it is None; nothing
in the toolkit reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class WorkerInfo:
    """The worker that runs this code, and the run it belongs to.

    `worker` of `workers`: 0 of 0 in the process that iterates. `shard` of `shards`: None where the pipeline has no
    `shard_by_worker`, and behind the merge.
    """

    worker: int
    workers: int
    seed: int
    epoch: int
    shard: int | None = None
    shards: int | None = None


current: ContextVar[WorkerInfo | None] = ContextVar("pipes_worker_info", default=None)


@contextmanager
def in_shard(shard: int, shards: int) -> Iterator[None]:
    """Tell the code of a `with` block which shard it belongs to."""
    now = current.get()
    token = current.set(None if now is None else replace(now, shard=shard, shards=shards))
    try:
        yield
    finally:
        current.reset(token)


def worker_info() -> WorkerInfo | None:
    """Return what runs the calling code: a `WorkerInfo` inside a run, None elsewhere.

    >>> from pipes import map, pipe
    >>> worker_info() is None, next(iter(pipe([0], map(lambda _: worker_info().epoch)).at_epoch(3)))
    (True, 3)

    For looking, and for opening a file or a connection per worker; output that depends on it breaks the law that output
    does not depend on the number of workers.
    """
    return current.get()
