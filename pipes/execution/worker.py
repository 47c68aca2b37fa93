"""What a worker does: answer tasks. `Computer` is the same in a thread and in a process; `main` is a process's life.

Laws: an answer depends on the task alone; everything that user code raises becomes part of an answer; a worker never
waits for anything but its next task, and ends when the consumer does.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from pipes import collating, info
from pipes.context import Context, Pair
from pipes.errors import WorkerError
from pipes.execution import wire
from pipes.execution.arena import Arena
from pipes.execution.launch import ignore_interrupts
from pipes.execution.messages import Advance, LetGo, Place, Reply, Task, Units
from pipes.execution.plan import Plan
from pipes.execution.shipment import thaw
from pipes.execution.waiting import readable
from pipes.heads import Head
from pipes.info import WorkerInfo
from pipes.isolation import Seeded, Unseeded
from pipes.sharding import shard_by_worker

PART_SECONDS = 0.05
PART_OUTPUTS = 1024
SEND_BUFFER = 1 << 20


class Computer:
    """Compute tasks of one plan."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        workers: int,
        *,
        seeding: Unseeded,
        collect: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
        empty: Any = None,
    ) -> None:
        self._plan, self._worker, self._workers = plan, worker, workers
        self._collect, self._unpack = collect, unpack
        self._context = Context(globals=seeding, deferred=plan.deferred if empty else "")
        if empty is not None:
            self._context = self._context.at(empty=empty)
        self._head = lru_cache(maxsize=4)(self._bound_head)
        self._chains: dict[int, Iterator[Pair]] = {}
        self._chains_of = -1
        self._open: tuple[tuple[int, int, int], Iterator[Any]] = (-1, -1, -1), iter(())

    def prepare(self, task: Task) -> None:
        """Bind what a task will run, without running any of it."""
        if isinstance(task, Units):
            self._head(task.place)
        elif task.fresh:
            self._start_chain(task)

    def answer(self, task: Task) -> Reply:
        """Compute a task, up to the first error in it."""
        begun = time.perf_counter()
        outputs: list[Any] = []
        error, ended = None, False
        try:
            with self._informed(task):
                ended = self._units(task, outputs) if isinstance(task, Units) else self._advance(task, outputs)
        except Exception as raised:  # noqa: BLE001  # it is raised again in the consumer
            error = raised
        return Reply(task.run, task.task, outputs, error, ended, time.perf_counter() - begun)

    @contextlib.contextmanager
    def _informed(self, task: Task) -> Iterator[None]:
        seed, epoch, _ = task.place
        shard = task.shard if isinstance(task, Advance) else None
        token = info.current.set(WorkerInfo(self._worker, self._workers, seed, epoch, shard, self._shards(task)))
        try:
            yield
        finally:
            info.current.reset(token)

    def _shards(self, task: Task) -> int | None:
        if isinstance(task, Units) or self._plan.part is None:
            return None
        return next(s.shards for s in self._plan.part.stages if isinstance(s, shard_by_worker))

    def _place(self, place: Place) -> Context:
        seed, epoch, path = place
        return self._context.at(seed=seed, epoch=epoch, path=path)

    def _bound_head(self, place: Place) -> Head:
        return self._plan.head(self._place(place))

    def _units(self, task: Units, outputs: list[Any]) -> bool:
        head = self._head(task.place)
        if head.is_long:
            return self._long_units(head, task, outputs)
        for unit, payload in task.units:
            of_unit: list[Any] = []
            outputs.append(of_unit)
            ys = head.outputs(unit, None if payload is None else self._unpack(payload))
            of_unit.extend(self._collected(y, f"unit {unit}") for y in ys)  # what came before an exception is kept
        return True

    def _long_units(self, head: Head, task: Units, outputs: list[Any]) -> bool:
        """Answer in parts: a unit may give outputs without an end, and the consumer may want a few of them."""
        deadline, left, given = time.perf_counter() + PART_SECONDS, PART_OUTPUTS, task.given
        for unit, payload in task.units:
            of_unit: list[Any] = []
            outputs.append(of_unit)
            for y in self._opened(head, task.run, unit, payload, given):
                of_unit.append(self._collected(y, f"unit {unit}"))
                left -= 1
                if left <= 0 or time.perf_counter() > deadline:
                    self._open = (task.run, unit, given + len(of_unit)), self._open[1]
                    return False
            given = 0
        return True

    def _opened(self, head: Head, run: int, unit: int, payload: Any, given: int) -> Iterator[Any]:
        """Go on with the unit that was left open, or begin it and pass over what was given."""
        if self._open[0] != (run, unit, given):
            ys = head.outputs(unit, None if payload is None else self._unpack(payload))
            self._open = (run, unit, given), itertools.islice(ys, given, None)
        return self._open[1]

    def _start_chain(self, task: Advance) -> None:
        if self._plan.part is None:
            raise TypeError("a plan without a part has no shards; this is a fault of pipes")
        node = self._plan.part.chain(self._place(task.place).at(shard=task.shard))
        self._chains[task.shard] = node.run(task.cursor)

    def _collected(self, y: Any, where: str) -> Any:
        try:
            return self._collect(y)
        except Exception as error:
            raise WorkerError(
                f"an output of type {type(y).__name__} cannot be sent from a worker: {type(error).__name__}: {error} "
                f"(output of {where}); return arrays, CPU tensors or other picklable objects"
            ) from error

    def _advance(self, task: Advance, outputs: list[Any]) -> bool:
        if self._chains_of != task.run:  # what an abandoned run left open is let go
            self._chains, self._chains_of = {}, task.run
        if task.fresh:
            self._start_chain(task)
        chain = self._chains[task.shard]
        for _ in builtins.range(task.count):
            pair = next(chain, None)
            if pair is None:
                return True
            outputs.append((self._collected(pair[0], f"shard {task.shard}"), pair[1]))
        return False


# -- a worker process ------------------------------------------------------------------------------------------------


def main(fds: list[int], plan: Plan | None = None, init: Callable[..., None] | None = None) -> None:
    """Live as a worker: `fds` are the socket, the arena, the pipe for stacks, the consumer, and the shipment's.

    A forked worker is given its plan; others find it in the shipment.
    """
    ignore_interrupts()
    sock, arena_fd, stacks, consumer, *shipped = fds
    threading.Thread(target=_end_with, args=(consumer,), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    with socket.socket(fileno=sock) as link, contextlib.suppress(EOFError, ConnectionError):
        number, workers, spans, told = wire.receive(link)
        arena = Arena(arena_fd)
        try:
            if plan is None:
                plan, init, registered = thaw(shipped, spans)
                _adopt_classes_of_main()
                for cls, fn in registered.items():
                    collating.register_collate(cls, fn)
            _limit_torch_to_one_thread()
            if init is not None:
                init(number, *pickle.loads(told))
        except Exception as error:  # noqa: BLE001  # it is raised again in the consumer
            error.add_note(f"pipes: while worker {number} started\n{traceback.format_exc()}")
            wire.send(link, wire.ready(error))
            return
        wire.send(link, wire.ready(None))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # a busy consumer need not read at once
        collect, unpack = wire.Encoder(arena).encode, pickle.loads
        computer = Computer(plan, number, workers, seeding=Seeded(), collect=collect, unpack=unpack, empty=arena.empty)
        _serve(link, computer, arena, number)


def _end_with(consumer: int) -> None:
    """End this process when the consumer ends: an end of stream comes only once no fork of it holds the socket."""
    readable([consumer])
    os._exit(1)


def _limit_torch_to_one_thread() -> None:
    """Keep N workers from running N times as many threads as there are cores; before its import, a variable does."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def _adopt_classes_of_main() -> None:
    """Put classes that cloudpickle rebuilt where pickle looks for them, so that results of them can be sent back."""
    from cloudpickle import cloudpickle

    import __main__

    sys.modules.setdefault("__mp_main__", __main__)  # what it is called in a child of multiprocessing
    for cls in list(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS):
        if cls.__module__ in ("__main__", "__mp_main__") and "." not in cls.__qualname__:
            setattr(__main__, cls.__name__, cls)


def _serve(link: socket.socket, computer: Computer, arena: Arena, number: int) -> None:
    waiting: deque[Task] = deque()
    newest = -1
    while True:
        while not waiting or readable([link.fileno()], 0):
            message: Task | LetGo = wire.receive(link)
            arena.returned(message.returned)
            if not isinstance(message, LetGo):
                newest = message.run
                waiting.append(message)
        task = waiting.popleft()
        if task.run == newest:  # else of a run that was abandoned
            reply = computer.answer(task)
            wire.send(link, wire.result(reply, None if reply.error is None else _packed(reply.error, number)))


def _packed(error: BaseException, number: int) -> bytes:
    lines = "".join(traceback.format_exception(error))
    error.add_note(f"pipes: raised in worker {number} (pid {os.getpid()}), where the traceback was\n{lines}")
    return wire.pack_error(error)
