"""A pool of worker processes.

Laws: a worker that ends by itself is noticed at once (by a pidfd: an end of stream would come only when helpers that
user code forked have ended too), what it had sent is delivered, and another takes its place; `close` returns with no
process and no descriptor left; nothing here blocks on a write.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from pipes import collating
from pipes.errors import WorkerError
from pipes.execution import launch, wire, worker
from pipes.execution.arena import Mapped
from pipes.execution.messages import LetGo, Task
from pipes.execution.plan import Plan
from pipes.execution.pool import Answered, Died, Event
from pipes.execution.shipment import Shipment, freeze, introduce
from pipes.execution.waiting import milliseconds, readable

GRACE = 1.0
STACK_WAIT = 2.0
STACK_PAUSE = 0.1


class Link:
    """The consumer's side of one worker."""

    def __init__(self) -> None:
        self.sock, self.theirs = socket.socketpair()
        self.sock.setblocking(False)
        self.outbox, self.inbox = wire.Outbox(self.sock), wire.Inbox(self.sock)
        self.arena = os.memfd_create("pipes-arena", os.MFD_CLOEXEC)
        self.mapped = Mapped(self.arena)
        finalizer = weakref.finalize(self.mapped, os.close, self.arena)  # undecoded results outlive the worker
        finalizer.atexit = False  # and may outlive exit handlers
        self.stacks, self.their_stacks = os.pipe()
        self.child: launch.Child | None = None
        self.is_ready = False

    def started(self, child: launch.Child) -> None:
        """Close what the child holds now."""
        self.child = child
        self.theirs.close()
        os.close(self.their_stacks)

    def close(self) -> None:
        """Close every descriptor but the arena's."""
        self.sock.close()
        os.close(self.stacks)
        if self.child is not None:
            self.child.close()
        else:
            self.theirs.close()
            os.close(self.their_stacks)


class ProcessPool:
    """Start `size` workers side by side and keep as many alive."""

    def __init__(
        self,
        plan: Plan,
        size: int,
        *,
        method: str,
        init: Callable[..., None] | None,
        restarts: int,
        tell: Callable[[int], Any] | None = None,
    ) -> None:
        self.size, self._plan, self._method, self._init, self._restarts = size, plan, method, init, restarts
        self._tell = tell
        self._shipment = None if method == "fork" else _frozen(plan, init)
        if method == "fork":
            introduce((plan, init))
        self._consumer = os.pidfd_open(os.getpid())
        self._poll = select.poll()
        self._links: list[Link] = []
        self._owners: dict[int, int] = {}
        self._failed_starts = 0
        launch.PRIVATE.add(self)
        try:
            for number in range(size):
                self._start(number)
        except BaseException:  # Ctrl-C too: nobody else knows the workers that have started
            self.close()
            raise

    # -- lives -----------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        link = Link()
        self._links[number : number + 1] = [link]
        shipped = [] if self._shipment is None else self._shipment.fds
        fds = [link.theirs.fileno(), link.arena, link.their_stacks, self._consumer, *shipped]
        target = partial(worker.main, plan=self._plan, init=self._init)
        modules = () if self._shipment is None else self._shipment.modules
        link.started(launch.start(self._method, fds, target, modules))
        spans = () if self._shipment is None else self._shipment.spans
        told = () if self._tell is None else (self._tell(number),)
        link.outbox.send((number, self.size, spans, wire.pack(told)))
        for fd in (link.sock.fileno(), link.child.pidfd if link.child else -1):
            self._owners[fd] = number
            self._poll.register(fd, select.POLLIN)

    def _bury(self, number: int) -> Died:
        link = self._links[number]
        if link.child is None:
            raise TypeError("a worker that was never started cannot end; this is a fault of pipes")
        how = _how_it_ended(number, link.child)
        self._forget(link)
        self._failed_starts = 0 if link.is_ready else self._failed_starts + 1
        tries, hopeless = self._failed_starts, self._failed_starts > self._restarts
        self._failed_starts = 0 if hopeless else self._failed_starts
        self._start(number)
        if hopeless:
            raise WorkerError(f"{how} while it started, {tries} times in a row; see what they printed")
        return Died(number, how, link.child.pid, link.child.status)

    def _forget(self, link: Link) -> None:
        for fd in (link.sock.fileno(), link.child.pidfd if link.child else -1):
            if self._owners.pop(fd, None) is not None:
                self._poll.unregister(fd)
        link.close()

    def close(self) -> None:
        """See `Pool.close`: ask by closing the socket, then kill."""
        links, self._links = self._links, []
        children = [link.child for link in links if link.child is not None]
        for link in links:
            link.sock.close()
        deadline = time.monotonic() + GRACE
        alive = {child.pidfd: child for child in children}
        while alive and (left := deadline - time.monotonic()) > 0:
            for pidfd in readable(alive, left):
                del alive[pidfd]
        for pidfd in alive:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        while alive:
            for pidfd in readable(alive):
                del alive[pidfd]
        for link in links:
            if link.child is not None:
                link.child.reap()
            link.close()
        self._shipment = None
        if self._consumer >= 0:
            os.close(self._consumer)
            self._consumer = -1

    def close_inherited(self) -> None:
        """See `launch.PRIVATE`."""
        links, self._links = self._links, []
        for link in links:
            link.sock.close()
            os.close(link.stacks)
            if link.child is not None:
                link.child.close()

    # -- traffic ---------------------------------------------------------------------------------------------------

    def send(self, worker: int, task: Task) -> None:
        """See `Pool.send`; slots that were let go ride along."""
        link = self._links[worker]
        returned = link.mapped.take_released()
        link.outbox.send(replace(task, returned=returned) if returned else task)
        self._watch(link)

    def _watch(self, link: Link) -> None:
        if link.sock.fileno() in self._owners:
            self._poll.modify(link.sock.fileno(), select.POLLIN | (select.POLLOUT if link.outbox else 0))

    def wait(self, timeout: float | None) -> list[Event]:
        """See `Pool.wait`."""
        for link in self._links:
            if link.mapped.has_large_released:
                link.outbox.send(LetGo(link.mapped.take_released()))
                self._watch(link)
        ready = self._poll.poll(milliseconds(timeout))
        events: list[Event] = []
        for number in sorted({self._owners[fd] for fd, _ in ready}):
            link = self._links[number]
            dead = link.child is not None and any(fd == link.child.pidfd for fd, _ in ready)
            if link.outbox:
                link.outbox.flush()
                if not dead:
                    self._watch(link)
            events += [event for frame in link.inbox.frames() if (event := self._event(number, link, frame))]
            if dead:  # after what it had sent
                events.append(self._bury(number))
            elif any(fd == link.sock.fileno() and flag & select.POLLHUP for fd, flag in ready):
                self._poll.unregister(link.sock.fileno())  # closed and not ended yet: its pidfd will tell
                del self._owners[link.sock.fileno()]
        return events

    def _event(self, number: int, link: Link, frame: bytes) -> Event | None:
        kind, *rest = pickle.loads(frame)
        if kind == "ready":
            link.is_ready = True
            if rest[0] is not None:
                raise wire.unpack_error(rest[0])
            return None
        run, task, ended, seconds, error, outputs = rest
        return Answered(
            number,
            run,
            task,
            ended,
            seconds,
            outputs=outputs,
            decode=partial(wire.decode, mapped=link.mapped),
            discard=partial(wire.let_go, mapped=link.mapped),
            error=lambda: None if error is None else wire.unpack_error(error),
        )

    def stack(self, worker: int) -> str:
        """See `Pool.stack`: a signal makes the worker write its stack, whatever it is doing."""
        link = self._links[worker]
        if link.child is None or not link.is_ready:
            return "its start"
        try:
            signal.pidfd_send_signal(link.child.pidfd, signal.SIGUSR1)
        except ProcessLookupError:
            return "ended"
        text, wait = b"", STACK_WAIT
        while link.stacks in readable([link.stacks, link.child.pidfd], wait):
            piece, wait = os.read(link.stacks, 1 << 16), STACK_PAUSE  # it is written in many small pieces
            if not piece:  # the end: the worker is gone
                break
            text += piece
        return text.decode(errors="replace") or "did not answer"

    def pack(self, payload: Any) -> Any:
        """See `Pool.pack`."""
        return wire.pack(payload)

    @property
    def children(self) -> list[launch.Child]:
        """See `Pool.children`."""
        return [link.child for link in self._links if link.child is not None]

    def name(self, worker: int) -> str:
        """See `Pool.name`."""
        child = self._links[worker].child
        return f"worker {worker} (pid {child.pid})" if child else f"worker {worker}"


def _how_it_ended(number: int, child: launch.Child) -> str:
    status = child.status
    if status is None:
        return f"worker {number} (pid {child.pid}) ended"
    if status < 0:
        return f"worker {number} (pid {child.pid}) was killed by {signal.Signals(-status).name}"
    return f"worker {number} (pid {child.pid}) ended with exit code {status}"


def _frozen(plan: Plan, init: Any) -> Shipment:
    from pipes.execution.blame import unpicklable

    what = (plan, init, collating.registered())
    try:
        return freeze(what)
    except Exception as error:
        raise WorkerError(unpicklable(plan, init, error)) from error
