"""What the consumer and its workers say to each other.

A worker gets `Units` and `Advance` in any number and answers each with one `Reply`, in order; a message of a newer run
makes it skip those of older ones, which then get no reply.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipes.context import Context, Cursor, Pair

type Place = tuple[int, int, tuple[Any, ...]]


def place_of(context: Context) -> Place:
    """What a worker must know of a context: seed, epoch and path."""
    return context.seed, context.epoch, context.path


@dataclass(frozen=True)
class Units:
    """Compute these units, (number, payload) each, and of the first only what follows `given` outputs."""

    run: int
    task: int
    place: Place
    units: list[tuple[int, Any]]
    given: int = 0
    returned: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Advance:
    """Give up to `count` more outputs of a shard; from `cursor` if `fresh`, else from where it is."""

    run: int
    task: int
    place: Place
    shard: int
    fresh: bool
    cursor: Cursor
    count: int
    returned: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LetGo:
    """Nothing to do: the consumer has let go of these slots, and they are too large to wait for the next task."""

    returned: list[int]


type Task = Units | Advance


@dataclass(frozen=True)
class Reply:
    """What came of a task: outputs by unit, or (output, cursor) pairs of a shard, up to the error if there was one.

    `ended` is True if there is no more: all units are done, or the shard is.
    """

    run: int
    task: int
    outputs: list[list[Any]] | list[Pair]
    error: BaseException | None = None
    ended: bool = False
    seconds: float = 0.0
