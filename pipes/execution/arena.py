"""Slots of anonymous shared memory that carry results from a worker to the consumer without a copy.

Each worker owns one memfd, cut into slots that it maps one by one. It writes results into a slot; the consumer's arrays
are views of its own mapping of the same slot. Laws: a slot is written again only when neither side holds a view of it;
a worker never waits for a slot, it takes a free one or grows its memfd; views outlive the worker, the loader and the
descriptor. (A memfd, not /dev/shm, which containers cap at 64 MB.)

Python tells when the last view is gone: `__release_buffer__` (PEP 688) is called exactly once, in whatever thread, in a
collection or at interpreter exit. So it does one thing, appending to a deque.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from pipes.execution.shipment import address_of

SMALL = 1 << 13
"""Bytes below which an array is copied into the frame: cheaper than its bookkeeping in a slot."""
LEAST = 1 << 18
LARGE = 1 << 20
ALIGNED = 64

type Span = tuple[int, int, int]
"""A slot's index among those of the frame, the first byte in it, and the number of bytes."""


class View:
    """Exports a mapping as a buffer, and says when the last buffer is gone."""

    __slots__ = ("_map", "_release")

    def __init__(self, memory: mmap.mmap, release: Callable[[], None]) -> None:
        self._map, self._release = memory, release

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self._map)

    def __release_buffer__(self, view: memoryview) -> None:
        view.release()
        self._release()


def _map(fd: int, offset: int, size: int) -> mmap.mmap:
    return mmap.mmap(fd, size, offset=offset, trackfd=False)  # else each of many mappings keeps a descriptor


class Slot:
    """A stretch of a worker's memfd."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        self.memory = _map(fd, offset, size)
        self.address = address_of(memoryview(self.memory))
        self.used = 0  # bytes given out since it was last free
        self.holds = 0  # the worker's own views of it, and the frames that the consumer has not let go


class Arena:
    """The worker's side: allocates arrays in slots and counts who holds them."""

    def __init__(self, fd: int) -> None:
        self._fd, self._end = fd, 0
        self._slots: dict[int, Slot] = {}
        self._current: Slot | None = None
        self._released: deque[Slot] = deque()

    def empty(self, shape: Any, dtype: Any = float) -> np.ndarray[Any, Any]:
        """Return an uninitialised array, in a slot unless it is small: `np.empty` for what is sent to the consumer."""
        kind = np.dtype(dtype)
        count = math.prod(shape) if isinstance(shape, tuple) else int(shape)
        if count * kind.itemsize < SMALL or kind.hasobject:
            return np.empty(shape, kind)
        slot, start = self.allocate(count * kind.itemsize)
        slot.holds += 1
        view = memoryview(View(slot.memory, _appending(self._released, slot)))
        return np.frombuffer(view, kind, count, offset=start).reshape(shape)

    def allocate(self, size: int) -> tuple[Slot, int]:
        """Return a slot and the first of `size` free bytes in it."""
        slot = self._current
        start = -(-slot.used // ALIGNED) * ALIGNED if slot is not None else 0
        if slot is None or start + size > slot.size:
            slot, start = self._free(size), 0
            self._current = slot
        slot.used = start + size
        return slot, start

    def _free(self, size: int) -> Slot:
        while self._released:
            self._released.popleft().holds -= 1
        fitting = [s for s in self._slots.values() if not s.holds and s.size >= size]
        if fitting:
            return min(fitting, key=lambda s: s.size)
        room = max(LEAST, 1 << (size - 1).bit_length())  # pages that are never touched cost nothing
        os.ftruncate(self._fd, self._end + room)
        slot = self._slots[self._end] = Slot(self._fd, self._end, room)
        self._end += room
        return slot

    def find(self, address: int) -> Slot | None:
        """Return the slot that an address lies in."""
        return next((s for s in self._slots.values() if s.address <= address < s.address + s.size), None)

    def returned(self, offsets: list[int]) -> None:
        """Take note that the consumer let go of a frame's slots."""
        for offset in offsets:
            self._slots[offset].holds -= 1


def _appending(released: deque[Any], what: Any) -> Callable[[], None]:
    """One bound append: all that may happen when a view dies."""
    append = released.append
    return lambda: append(what)


class Mapped:
    """The consumer's side: maps a worker's slots, and remembers those that it has let go of."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._maps: dict[int, mmap.mmap] = {}
        self._released: deque[tuple[int, int]] = deque()
        self.held = 0

    def view(self, offset: int, size: int) -> memoryview:
        """Return a slot as a buffer; when the last view of it is gone it goes back with the next task."""
        if offset not in self._maps:
            self._maps[offset] = _map(self._fd, offset, size)
        self.held += size
        return memoryview(View(self._maps[offset], _appending(self._released, (offset, size))))

    def release(self, offset: int, size: int) -> None:
        """Let go of a slot without ever having looked at it; nothing is mapped, since this may happen at exit."""
        self.held += size
        self._released.append((offset, size))

    @property
    def has_large_released(self) -> bool:
        """Whether a slot was let go that the worker should have at once: fewer slots in turn stay in the caches."""
        return any(size >= LARGE for _, size in tuple(self._released))

    def take_released(self) -> list[int]:
        """Return the offsets of slots let go since the last call."""
        offsets = []
        while self._released:
            offset, size = self._released.popleft()
            self.held -= size
            offsets.append(offset)
        return offsets
