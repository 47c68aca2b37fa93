"""Frames: how messages cross a socket.

A frame is a length and a pickle. A result's pickle (protocol 5) has its big buffers out of band, in slots of the arena,
and lies in a slot itself if it is large. Laws: what is decoded equals what was encoded, arrays writable and private to
the receiver; a peer that dies in the middle of a frame leaves an end of stream, never half a message.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
import socket
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import cloudpickle

from pipes.errors import WorkerError
from pipes.execution.arena import SMALL, Arena, Mapped, Slot, Span
from pipes.execution.messages import Reply
from pipes.execution.shipment import address_of, reduced_tensor

LARGE = 1 << 15
HEADER = struct.Struct("<Q")
RECEIVED_AT_ONCE = 1 << 18

HELD_AT_MOST = 1 << 28
"""Bytes of one worker's slots that the consumer may hold before it gets copies."""


# -- results: encoded by a worker, decoded by the consumer -----------------------------------------------------------


type Body = bytes | tuple[bytes | Span, list[Span], list[tuple[int, int]]]
"""An output: its pickle alone, or (pickle or where it lies, its buffers, the slots that they lie in)."""


class Encoder:
    """Encode outputs, each as soon as it is made: user code may reuse an array for the next one."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def encode(self, obj: Any) -> Body:
        """Return what `decode` rebuilds; raises what pickling raises."""
        buffers: list[memoryview] = []

        def out_of_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < SMALL:
                return True
            buffers.append(raw)
            return False

        pickled = _dumps(obj, out_of_band, buffers)
        if not buffers and len(pickled) <= LARGE:
            return pickled
        slots: dict[int, Slot] = {}
        spans = [self._placed(raw, slots) for raw in buffers]
        head = self._placed(memoryview(pickled), slots) if len(pickled) > LARGE else pickled
        return head, spans, [(s.offset, s.size) for s in slots.values()]

    def _placed(self, raw: memoryview, slots: dict[int, Slot]) -> Span:
        """Find where a buffer lies in the arena, or copy it there."""
        address = address_of(raw)
        slot = self._arena.find(address)
        if slot is None:
            slot, start = self._arena.allocate(raw.nbytes)
            memoryview(slot.memory)[start : start + raw.nbytes] = raw
        else:
            start = address - slot.address
        if slot.offset not in slots:
            slots[slot.offset] = slot
            slot.holds += 1  # at once: the next allocation must not take it for free
        return list(slots).index(slot.offset), start, raw.nbytes


def _dumps(obj: Any, out_of_band: Any, buffers: list[memoryview]) -> bytes:
    """Pickle by reference where that works, and classes of `__main__` and of functions by value."""
    try:
        if "torch" not in sys.modules:
            return pickle.dumps(obj, 5, buffer_callback=out_of_band)
        file = io.BytesIO()
        pickler = pickle.Pickler(file, 5, buffer_callback=out_of_band)
        pickler.dispatch_table = _with_tensors()
        pickler.dump(obj)
    except Exception:  # noqa: BLE001  # raised by the second attempt if it fails as well
        buffers.clear()
        file = io.BytesIO()
        _CloudPickler(file, 5, buffer_callback=out_of_band).dump(obj)
    return file.getvalue()


@cache
def _with_tensors() -> dict[Any, Any]:
    """Pickle's table of reducers with one for tensors: asked without a call into Python for each object."""
    import torch  # imported already

    return {**copyreg.dispatch_table, torch.Tensor: lambda t: reduced_tensor(t) or t.__reduce_ex__(5)}


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        """Send a tensor as an array, whose buffer goes out of band."""
        reduced = reduced_tensor(obj)
        return super().reducer_override(obj) if reduced is None else reduced


def decode(body: Body, mapped: Mapped) -> Any:
    """Rebuild an output on views of the worker's slots, or on copies if the consumer holds very many."""
    if isinstance(body, bytes):
        return pickle.loads(body)
    head, spans, slots = body
    copied = mapped.held > HELD_AT_MOST
    views = [mapped.view(offset, size) for offset, size in slots]

    def buffer(span: Span) -> Any:
        index, start, size = span
        part = views[index][start : start + size]
        return bytearray(part) if copied else part

    return pickle.loads(head if isinstance(head, bytes) else buffer(head), buffers=[buffer(span) for span in spans])


def let_go(body: Body, mapped: Mapped) -> None:
    """Return the slots of an output that nobody wants."""
    if not isinstance(body, bytes):
        for offset, size in body[2]:
            mapped.release(offset, size)


def pack(payload: Any) -> bytes:
    """Serialise elements for a worker; those of classes that it cannot import by value."""
    try:
        data = pickle.dumps(payload, 5)
    except Exception:  # noqa: BLE001  # raised by the second attempt if it fails as well
        return bytes(cloudpickle.dumps(payload, 5))
    return bytes(cloudpickle.dumps(payload, 5)) if b"_main__" in data else data


# -- exceptions ------------------------------------------------------------------------------------------------------


def pack_error(error: BaseException, above: tuple[int, ...] = ()) -> bytes:
    """Serialise an exception with its type, arguments, fields, notes and causes; `above` ends a cycle of those."""
    cause, seen = error.__cause__, (*above, id(error))
    of_cause = None if cause is None or id(cause) in seen or len(seen) > CAUSES else pack_error(cause, seen)
    ways = itertools.product((error, _Rebuilt(error), _Rebuilt(error, only=_can_go)), (pickle.dumps, cloudpickle.dumps))
    for reduced, dumps in ways:
        try:
            data = dumps((reduced, of_cause), 5)
            if type(_unpacked(pickle.loads(data)[0])) is type(error):
                return bytes(data)
        except Exception:  # noqa: BLE001, S112  # the next way is more robust, and the last one cannot fail
            continue
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    text = "".join(traceback.format_tb(error.__traceback__))
    lost = WorkerError(f"{name} was raised in a worker and could not be sent; its traceback was\n{text}")
    for note in getattr(error, "__notes__", ()):
        lost.add_note(str(note))
    return pickle.dumps((lost, of_cause), 5)


CAUSES = 16


def _can_go(x: Any) -> bool:
    try:
        cloudpickle.dumps(x)
    except Exception:  # noqa: BLE001  # whatever it is, it is the answer
        return False
    return True


class _Rebuilt:
    """An exception as (type, arguments, fields), for types whose constructor does not take their arguments."""

    def __init__(self, error: BaseException, only: Callable[[Any], bool] = lambda _: True) -> None:
        self.cls = type(error)
        self.args = tuple(x if only(x) else f"<{type(x).__name__}>" for x in error.args)
        self.fields = {k: v for k, v in vars(error).items() if only(v)}

    def rebuild(self) -> BaseException:
        """Make the exception without calling its constructor."""
        error = self.cls.__new__(self.cls, *self.args)
        error.args = self.args
        vars(error).update(self.fields)
        return error


def _unpacked(x: Any) -> BaseException:
    error: BaseException = x.rebuild() if isinstance(x, _Rebuilt) else x
    return error


def unpack_error(data: bytes) -> BaseException:
    """Rebuild an exception."""
    packed, cause = pickle.loads(data)
    error = _unpacked(packed)
    if cause is not None:
        error.__cause__ = unpack_error(cause)
    return error


# -- sockets ---------------------------------------------------------------------------------------------------------


def receive(sock: socket.socket) -> Any:
    """Read one message, waiting for it; raises EOFError at the end of the stream."""
    (size,) = HEADER.unpack(_read(sock, HEADER.size))
    return pickle.loads(_read(sock, size))


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            raise EOFError("the consumer is gone")
        done += count
    return data


def send(sock: socket.socket, body: bytes) -> None:
    """Write one frame, waiting for room."""
    sock.sendall(HEADER.pack(len(body)) + body)


class Outbox:
    """Frames to a worker that never block: a worker that is itself blocked on writing would wait for us for ever."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting: deque[memoryview] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def send(self, message: Any) -> None:
        """Queue a message and write what fits."""
        body = pickle.dumps(message, 5)
        self._waiting.append(memoryview(HEADER.pack(len(body)) + body))
        self.flush()

    def flush(self) -> None:
        """Write what fits; a dead peer is noticed elsewhere."""
        try:
            while self._waiting:
                sent = self._sock.send(self._waiting[0])
                if sent == len(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][sent:]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._waiting.clear()


class Inbox:
    """Frames from a worker, whole ones only."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()

    def frames(self) -> list[bytes]:
        """Return the bodies of the frames that have arrived."""
        try:
            while chunk := self._sock.recv(RECEIVED_AT_ONCE):
                self._data += chunk
                if len(chunk) < RECEIVED_AT_ONCE:
                    break
        except (BlockingIOError, ConnectionResetError):
            pass
        frames, start = [], 0
        while len(self._data) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._data, start)
            if len(self._data) - start < HEADER.size + size:
                break
            start += HEADER.size
            frames.append(bytes(self._data[start : start + size]))
            start += size
        del self._data[:start]
        return frames


# -- the three frames that a worker sends ----------------------------------------------------------------------------


def ready(error: BaseException | None) -> bytes:
    """The first frame of a worker: it has started, or could not."""
    return pickle.dumps(("ready", None if error is None else pack_error(error)), 5)


def result(reply: Reply, error: bytes | None) -> bytes:
    """The answer to a task."""
    return pickle.dumps(("result", reply.run, reply.task, reply.ended, reply.seconds, error, reply.outputs), 5)
