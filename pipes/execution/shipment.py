"""Carry a pipeline to worker processes: serialised once, its big buffers placed once in shared memory.

Laws: what arrives equals what was sent; a write in a worker is seen by nobody else (mappings are private); a `memmap`
travels as its file's name and an array made by `share` as its descriptor, so neither is copied; a part that cannot be
serialised is an error that names stage and attribute, before any process starts.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import sys
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAliasType

import cloudpickle
import numpy as np

from pipes.packed import LONG, Packed, worth_packing
from pipes.values import is_tensor

BIG = 1 << 12
PAGE = mmap.PAGESIZE
PIECE = 1 << 30
DESCRIPTORS = 32


class Memory:
    """A private mapping of a memfd: reads share the pages, a write is seen here only."""

    def __init__(self, fd: int) -> None:
        self.fd, self.size = fd, os.fstat(fd).st_size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(fd, self.size, flags=mmap.MAP_PRIVATE, prot=protection, trackfd=False)
        self.address = address_of(memoryview(self._map))
        weakref.finalize(self, os.close, fd)
        _MEMORIES.add(self)

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self._map)  # and every array of it keeps this object, and so the descriptor


_MEMORIES: weakref.WeakSet[Memory] = weakref.WeakSet()


def address_of(view: memoryview) -> int:
    """Return where a buffer lies."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if view.nbytes else 0


def share(array: Any) -> Any:
    """Return a copy of an array (or CPU tensor) in shared memory, which workers map instead of copying.

    >>> a = share(np.arange(3))
    >>> a[0] = 7  # seen by this process only
    >>> a.tolist()
    [7, 1, 2]

    Without it an array in a pipeline is copied once, for all workers together; with it never. The mapping is private: a
    write is seen by the process that makes it. Writes of this process after `share` do not reach workers.
    """
    if is_tensor(array) and (reduced := reduced_tensor(array)) is not None:
        rebuild, (raw, *rest) = reduced
        return rebuild(share(raw), *rest)
    plain = np.ascontiguousarray(array)
    if plain.dtype.hasobject:
        raise TypeError(f"`array` must hold numbers, got dtype {plain.dtype}; objects cannot be shared")
    fd = os.memfd_create("pipes-shared", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(plain.nbytes, PAGE))
    write_all(fd, plain.reshape(-1).view(np.uint8).data if plain.size else memoryview(b""), 0)
    return np.frombuffer(Memory(fd), plain.dtype, plain.size).reshape(np.shape(array))


def write_all(fd: int, view: memoryview, offset: int) -> None:
    """Write a buffer at an offset, in pieces that the kernel takes."""
    while view.nbytes:
        written = os.pwrite(fd, view[:PIECE], offset)
        view, offset = view[written:], offset + written


@dataclass(frozen=True)
class Shipment:
    """A frozen object: memory to pass, and where the pickle (first) and its buffers lie in it."""

    memory: Memory
    shared: tuple[Memory, ...]
    spans: tuple[tuple[int, int], ...]
    modules: tuple[str, ...]

    @property
    def fds(self) -> list[int]:
        """The descriptors that `thaw` needs, in its order."""
        return [self.memory.fd, *[m.fd for m in self.shared]]


def freeze(obj: Any) -> Shipment:
    """Serialise an object once, for any number of processes."""
    file, buffers = io.BytesIO(), []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BIG:
            return True
        buffers.append(raw)
        return False

    if (script := sys.modules.get("__mp_main__")) is not None:  # in a child of multiprocessing: no worker can import it
        cloudpickle.register_pickle_by_value(script)
    pickler = _Freezer(file, out_of_band)
    pickler.dump(obj)
    views = [file.getbuffer(), *buffers]
    starts = np.cumsum([0, *[-(-v.nbytes // PAGE) * PAGE for v in views]]).tolist()
    fd = os.memfd_create("pipes-shipment", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(starts[-1], PAGE))
    for start, view in zip(starts, views):
        write_all(fd, view, start)
    spans = tuple((start, view.nbytes) for start, view in zip(starts, views))
    return Shipment(
        Memory(fd),
        tuple(pickler.shared),
        spans,
        tuple(sorted(pickler.modules - {"__main__", "__mp_main__", "builtins"})),
    )


def thaw(fds: list[int], spans: tuple[tuple[int, int], ...]) -> Any:
    """Rebuild a frozen object on private mappings of its descriptors."""
    memory, *shared = [Memory(fd) for fd in fds]
    whole = memoryview(memory)
    head, *buffers = [whole[start : start + size] for start, size in spans]
    return _Thawer(io.BytesIO(head), shared, buffers).load()


class _Freezer(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Send lists packed, memmaps by name, shared arrays by descriptor and tensors as arrays."""

    def __init__(self, file: io.BytesIO, out_of_band: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=out_of_band)
        self.shared: list[Memory] = []
        self.modules: set[str] = set()
        self._packed: dict[int, tuple[int, list[Any], Packed | None]] = {}  # by id; lists are kept, so ids stay unique

    def persistent_id(self, obj: Any) -> Any:
        """Name what does not travel in the pickle."""
        if type(obj) is np.ndarray:
            return self._by_descriptor(obj)
        if type(obj) is list and len(obj) >= LONG:
            return self._packed_list(obj)
        return None

    def _packed_list(self, items: list[Any]) -> Any:
        """Pack a long list: `persistent_id` is the only hook that sees one; its arrays go out of band like any."""
        if id(items) not in self._packed:
            self._packed[id(items)] = len(self._packed), items, Packed.pack(items) if worth_packing(items) else None
            packed = self._packed[id(items)][2]
            return None if packed is None else ("packed", self._packed[id(items)][0], packed.data, packed.ends)
        number, _, packed = self._packed[id(items)]
        return None if packed is None else ("packed", number)

    def reducer_override(self, obj: Any) -> Any:
        """Replace what has a better way to travel."""
        named = isinstance(obj, (type, types.FunctionType))
        module = obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__ if named else None
        self.modules.add(str(module or type(obj).__module__))
        if type(obj) is np.memmap and (reduced := _memmap_by_name(obj)) is not None:
            return reduced
        if (reduced := reduced_tensor(obj)) is not None:
            return reduced
        if type(obj) is TypeAliasType and obj.__module__ == "__main__":  # cloudpickle sends it by name, to nowhere
            return TypeAliasType, (obj.__name__, obj.__value__)
        return super().reducer_override(obj)

    def _by_descriptor(self, array: np.ndarray[Any, Any]) -> Any:
        memory = next((m for m in _MEMORIES if m.address <= _start(array) < m.address + m.size), None)
        if memory is None or not array.flags.c_contiguous or array.nbytes < BIG:
            return None
        if memory not in self.shared and len(self.shared) == DESCRIPTORS:
            return None  # copied: a process may have too few descriptors for more
        if memory not in self.shared:
            self.shared.append(memory)
        return self.shared.index(memory), _start(array) - memory.address, array.dtype, array.shape


class _Thawer(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Memory], buffers: list[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._shared = shared
        self._lists: dict[int, Packed] = {}

    def persistent_load(self, pid: Any) -> Any:
        """Rebuild an array, or a packed list, on a shared mapping."""
        if pid[0] == "packed":
            if pid[1] not in self._lists:
                self._lists[pid[1]] = Packed(*pid[2:])
            return self._lists[pid[1]]
        index, start, dtype, shape = pid
        size = int(np.prod(shape))
        return np.frombuffer(self._shared[index], dtype, size, offset=start).reshape(shape)


def _start(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _memmap_by_name(array: Any) -> Any:
    """Reduce a memmap to its file, or None where it is no plain window of one."""
    opened = getattr(array, "_mmap", None)
    if opened is None or array.filename is None or not array.flags.c_contiguous or array.size == 0:
        return None
    if array.mode == "c" or not _maps_that_file(_start(array), str(array.filename)):
        return None  # it may hold private writes, or its file may be gone: what it shows is what is sent
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = start + _start(array) - address_of(memoryview(opened))
    mode = "r" if array.mode == "r" else "c"
    return np.memmap, (str(array.filename), array.dtype, mode, offset, array.shape)


def _maps_that_file(address: int, path: str) -> bool:
    """Tell whether the file at `path` is the one that is mapped at `address`."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            span, _, _, device, inode, *_ = line.split(maxsplit=5)
            begin, end = (int(x, 16) for x in span.split("-"))
            if begin <= address < end:
                major, minor = (int(x, 16) for x in device.split(":"))
                return (os.makedev(major, minor), int(inode)) == (status.st_dev, status.st_ino)
    return False


def introduce(obj: Any) -> None:
    """Let cloudpickle know the classes in `obj`, so that a forked worker sends back objects of the very same ones."""
    with contextlib.suppress(Exception):  # what cannot be pickled need not be, under fork
        _Introducer(io.BytesIO(), lambda _: False).dump(obj)


class _Introducer(_Freezer):
    """Walks an object as the freezer does, but leaves out data."""

    def persistent_id(self, obj: Any) -> Any:
        """Leave out arrays and long lists."""
        return 0 if isinstance(obj, np.ndarray) or (type(obj) is list and len(obj) >= LONG) else None


def reduced_tensor(obj: Any) -> Any:
    """Reduce a plain CPU tensor to an array; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor):
        return None
    if type(obj) is torch.Tensor:
        try:
            array = obj.numpy()  # refuses whatever is no plain array in this process's memory
        except (TypeError, RuntimeError):  # told apart below
            array = None
        if array is not None and array.flags.c_contiguous:
            return tensor_of, (array,)
    if obj.device.type != "cpu":
        raise TypeError(
            f"a tensor on {obj.device} cannot go to another process; move it to the accelerator behind pin(), "
            "in the training loop"
        )
    if obj.requires_grad and not obj.is_leaf:
        raise TypeError("a tensor that has a gradient's history cannot go to another process; return x.detach()")
    if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized or obj.is_conj():
        return None
    order = sorted(range(obj.dim()), key=lambda d: -obj.stride(d))  # a memory format is kept, gaps are not
    plain = obj.detach().permute(order).contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    how = str(plain.dtype).partition(".")[2], tuple(plain.shape), tuple(np.argsort(order).tolist())
    return rebuilt_tensor, (raw, *how, obj.requires_grad)


def tensor_of(array: np.ndarray[Any, Any]) -> Any:
    """Return an array as a tensor."""
    import torch  # only a pipeline of tensors needs torch

    return torch.from_numpy(array)


def rebuilt_tensor(
    raw: np.ndarray[Any, Any], dtype: str, shape: Sequence[int], order: Sequence[int], requires_grad: bool
) -> Any:
    """Rebuild a tensor on the memory of an array."""
    import torch  # only a pipeline of tensors needs torch

    tensor = torch.from_numpy(raw).view(getattr(torch, dtype)).view(tuple(shape)).permute(tuple(order))
    return tensor.requires_grad_() if requires_grad else tensor
