"""What tests send to workers: importable there without a test framework, and without torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pipes as p


def number(x: Any) -> int:
    """A number that depends on the printed value alone, in every process."""
    return int.from_bytes(hashlib.blake2b(repr(x).encode(), digest_size=4).digest(), "little")


class CustomError(Exception):
    """An exception whose constructor takes other arguments than those it keeps."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(f"{what} {code}")
        self.code = code


class TwoArgumentsError(ValueError):
    """An exception with two positional arguments and a field."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first, second)
        self.field = [first]


class Faulty:
    """Raise for some elements, depending on the element alone."""

    def __init__(self, modulus: int, kind: str) -> None:
        self.modulus, self.kind = modulus, kind

    def __repr__(self) -> str:
        return f"Faulty({self.modulus}, {self.kind!r})"

    def __call__(self, x: Any) -> Any:
        if number(x) % self.modulus == 0:
            raise_a(self.kind, x)
        return x


KINDS = ("plain", "custom", "two", "caused", "noted", "stop", "key")


def raise_a(kind: str, x: Any) -> None:
    if kind == "plain":
        raise RuntimeError("plain", repr(x))
    if kind == "custom":
        raise CustomError("custom", code=number(x))
    if kind == "two":
        raise TwoArgumentsError(repr(x), 2)
    if kind == "caused":
        try:
            raise CustomError("cause", code=1)
        except CustomError as cause:
            raise OSError(2, "caused") from cause
    if kind == "noted":
        error = ZeroDivisionError("noted")
        error.add_note("a note of the user's")
        raise error
    if kind == "stop":
        raise StopIteration(repr(x))
    raise KeyError(repr(x))


class FailsAt:
    """Raise at one element."""

    def __init__(self, at: Any, kind: str = "plain") -> None:
        self.at, self.kind = at, kind

    def __call__(self, x: Any) -> Any:
        if x == self.at:
            raise_a(self.kind, x)
        return x


class Kills:
    """End the process in some way at some elements, the first `times` times each; the folder counts."""

    def __init__(self, folder: str, at: tuple[int, ...], how: str = "kill", times: int = 1) -> None:
        self.folder, self.at, self.how, self.times = folder, at, how, times

    def __call__(self, x: Any) -> Any:
        if x in self.at and any(created(Path(self.folder) / f"{x}-{i}") for i in range(self.times)):
            end_this_process(self.how)
        return x


def created(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def end_this_process(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "_exit":
        os._exit(0)
    if how == "exit":
        sys.exit()
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError(f"still alive after {how}")


def doubled(x: Any) -> Any:
    return x * 2


def jittered(x: Any, rng: np.random.Generator) -> Any:
    return (x, int(rng.integers(10**6)))


def drawn_globally(x: Any) -> Any:
    return (x, random.randrange(10**6), int(np.random.randint(10**6)))


def big(x: int) -> np.ndarray[Any, Any]:
    return np.full(37_500, x, np.float64)


def told(_: Any) -> p.WorkerInfo | None:
    return p.worker_info()


def pid_of(_: Any) -> int:
    return os.getpid()


def has_torch(x: int) -> np.ndarray[Any, Any]:
    return np.array([x, "torch" in sys.modules], np.int64)


def nested(x: int) -> list[int]:
    with p.execute(p.pipe(range(x), p.map(doubled)), workers=1, start_method="fork") as loader:
        return list(loader)


def nested_by_default(x: int) -> list[int]:
    with p.execute(p.pipe(range(x), p.map(doubled)), workers=1) as loader:
        return list(loader)


OPEN: list[Any] = []


def nested_and_open(x: int) -> int:
    """Leave an iterator open, and so workers of a worker."""
    OPEN.append(iter(p.execute(p.pipe(range(10), p.repeat(), p.map(doubled)), workers=1, start_method="fork")))
    return int(next(OPEN[-1])) + x


def initialised(number_of_worker: int) -> None:
    os.environ["PIPES_TEST_NUMBER"] = str(number_of_worker)


def number_given(_: Any) -> tuple[str, int]:
    info = p.worker_info()
    assert info is not None
    return os.environ["PIPES_TEST_NUMBER"], info.worker


def refusing(_: int) -> None:
    raise CustomError("refused", code=5)


def dying(_: int) -> None:
    os._exit(7)


class DiesAtStart:
    """Kill a worker while it starts, the first time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, _: int) -> None:
        if created(Path(self.folder) / "start"):
            end_this_process("kill")


class Blocks:
    """Wait for ever at one element: for a lock that nobody releases."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, x: int) -> int:
        if x == self.at:
            wait_for_ever()
        return x


def wait_for_ever() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


class Local:
    """A data set of one array, which it changes when asked."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[float, int]:
        first = float(self.array[0])
        self.array[0] = -1 - i
        return first, os.getpid()


class Reads:
    """Look a number up in something."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __call__(self, i: int) -> Any:
        return self.table[i]


class ReadsAll:
    """Look a number up in several things."""

    def __init__(self, tables: list[Any]) -> None:
        self.tables = tables

    def __call__(self, i: int) -> list[Any]:
        return [table[i] for table in self.tables]


class Describes:
    """Tell what became of an object on the way, and look something up in it."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __call__(self, i: int) -> Any:
        return type(self.table).__name__, str(getattr(self.table, "filename", "")), self.table[i]


class Locked:
    """A stream that holds what cannot be serialised."""

    def __init__(self, path: str) -> None:
        self.lock, self.file = threading.Lock(), open(path)  # noqa: SIM115  # it is the point of the test
        self.pid = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        with self.lock:
            yield from ((i, self.pid, os.getpid()) for i in range(20))


class Lock:
    """Hold a lock two attributes deep."""

    def __init__(self) -> None:
        self.inner = {"deep": [threading.Lock()]}

    def __call__(self, x: Any) -> Any:
        return x


def lock_at_three(x: int) -> Any:
    return threading.Lock() if x == 3 else x


def meta_at_three(x: int) -> Any:
    import torch

    return torch.empty(2, device="meta") if x == 3 else x


def untouched(x: Any) -> Any:
    return x


def parent_of(_: Any) -> tuple[int, int]:
    return os.getpid(), os.getppid()


def with_pid(x: Any) -> tuple[Any, int]:
    return x, os.getpid()


def repr_of(x: Any) -> str:
    return repr(vars(x)) if isinstance(x, Reads) else repr(x) if not callable(x) else x.__name__


class Gate:
    """Lets every element pass but one, which waits until somebody opens a named pipe for writing."""

    def __init__(self, path: str, held: int) -> None:
        self.path, self.held = path, held

    def __call__(self, x: int) -> int:
        if x == self.held:
            with open(self.path, encoding="utf-8") as pipe:
                pipe.read()
        return x
