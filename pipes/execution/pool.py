"""What a pool of workers is to the schedule, whatever its workers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pipes.execution.launch import Child
from pipes.execution.messages import Task


@dataclass(frozen=True)
class Answered:
    """A worker has computed a task up to `error()`, if that is not None.

    `outputs` are as `Reply` has them, each to be given either to `decode` or to `discard`.
    """

    worker: int
    run: int
    task: int
    ended: bool
    seconds: float
    outputs: list[Any]
    decode: Callable[[Any], Any]
    discard: Callable[[Any], Any]
    error: Callable[[], BaseException | None]


@dataclass(frozen=True)
class Died:
    """A worker ended by itself; another has taken its place."""

    worker: int
    how: str
    pid: int
    status: int | None


type Event = Answered | Died


class Pool(Protocol):
    """Workers that answer tasks."""

    size: int

    @property
    def children(self) -> list[Child]:
        """The workers' processes; none where they are threads."""

    def send(self, worker: int, task: Task) -> None:
        """Give a worker a task, without waiting."""

    def wait(self, timeout: float | None) -> list[Event]:
        """Return what has happened; wait for something, at most `timeout` seconds."""

    def pack(self, payload: Any) -> Any:
        """Return what carries a payload to a worker; raises what serialising raises."""

    def stack(self, worker: int) -> str:
        """Tell where a worker stands."""

    def name(self, worker: int) -> str:
        """Name a worker for an error."""

    def close(self) -> None:
        """End the workers and release everything."""
