"""Start worker processes, without `multiprocessing` and without importing `__main__`.

* `forkserver`: a clean interpreter of ours that has imported what is needed and forks on request; one per process.
* `spawn`: a clean interpreter for each worker.
* `fork`: a fork of this process.

Descriptors (sockets, memfds) are passed; everything else arrives in the worker's first message. Laws: a child holds no
descriptor of another worker; a server and every worker end when this process does, however it ends; Ctrl-C is this
process's alone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipes.execution.waiting import readable

METHODS = ("forkserver", "spawn", "fork")
REQUEST = 1 << 17
GRACE = 1.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
TUNABLES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x20000"}
"""Let large copies bypass the caches, in workers: what is collated into shared memory is read by another process.

Measured on two cores: 3,100 instead of 1,800 copies/s of 10 MB into slots. glibc reads it when an interpreter starts;
others ignore it, and user code and its processes do not see it.
"""
BOOT = "import sys; sys.path[:] = {path!r}; from pipes.execution import launch; launch.{entry}({fds!r})"

type Target = Callable[[list[int]], None]


@dataclass
class Child:
    """A started process: `pidfd` turns readable when it ends, and `status` tells how it ended, where that is known."""

    pid: int
    pidfd: int
    ask: Callable[[], int | None]
    ours: bool = True

    @cached_property
    def status(self) -> int | None:
        """The exit code, negative for a signal; asked for once, since a child can be reaped once."""
        return self.ask()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.pidfd)

    def reap(self) -> None:
        """Take the child's status, so that it leaves no zombie; the fork server takes that of its own."""
        if self.ours:
            _ = self.status


def start(method: str, fds: list[int], target: Target, modules: tuple[str, ...]) -> Child:
    """Start a worker that runs `target(fds)`: `pipes.execution.worker.main`, or in a fork anything."""
    if method == "fork":
        return _fork(fds, target)
    if method == "spawn":
        return _spawned(_interpreter("work", fds))
    return _server().fork(fds, modules)


# -- a clean interpreter ---------------------------------------------------------------------------------------------


def _interpreter(entry: str, fds: list[int]) -> subprocess.Popen[bytes]:
    code = BOOT.format(path=sys.path, entry=entry, fds=fds)
    flags = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    flags += [f"-W{option}" for option in sys.warnoptions]
    with _without_interrupts():
        return subprocess.Popen(  # noqa: S603  # our own interpreter on our own code
            [sys.executable, *flags, "-c", code],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env={**ONE_THREAD, **TUNABLES, **os.environ},
        )


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start children deaf to Ctrl-C from their first instruction: they unblock it once they ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the consumer, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _spawned(process: subprocess.Popen[bytes]) -> Child:
    return Child(process.pid, os.pidfd_open(process.pid), process.wait)


def work(fds: list[int]) -> None:
    """Run a spawned worker."""
    _forget_tunables()
    from pipes.execution import worker

    worker.main(fds)


def _forget_tunables() -> None:
    for name, ours in TUNABLES.items():
        if os.environ.get(name) == ours:
            del os.environ[name]


# -- a fork of this process ------------------------------------------------------------------------------------------

PRIVATE: weakref.WeakSet[Any] = weakref.WeakSet()
"""What must be closed in a forked child: a copy of another worker's socket would keep it open after our death."""


def _fork(fds: list[int], target: Target) -> Child:
    with warnings.catch_warnings(), _without_interrupts():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork among threads: the caller asked for it by name
        pid = os.fork()
        if pid == 0:
            _run_child(fds, target)
    return Child(pid, os.pidfd_open(pid), lambda: _reaped(pid))


def _run_child(fds: list[int], target: Target) -> None:
    """Never return: a forked child must not run the caller's code, nor its exit handlers."""
    code = 1
    gc.freeze()  # the program's garbage is the program's: its finalizers must not run here
    try:
        for private in list(PRIVATE):
            private.close_inherited()
        PRIVATE.clear()  # a fork of this fork has nothing left to close
        target(fds)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  # printed as an interpreter would
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _reaped(pid: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


# -- the fork server: the consumer's side ----------------------------------------------------------------------------


class _Server:
    """A clean interpreter that forks on request. It ends when its socket or this process does."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pidfd = os.pidfd_open(self.owner)
        try:
            self._process = _interpreter("serve", [theirs.fileno(), pidfd])
        finally:
            os.close(pidfd)
            theirs.close()
        self._watched = os.pidfd_open(self._process.pid)
        self._lock = threading.Lock()
        self._asking = False  # stays True if Ctrl-C comes between a question and its answer
        PRIVATE.add(self)
        weakref.finalize(self, _end_server, self.owner, self._sock, self._process, self._watched)

    def close_inherited(self) -> None:
        """See `PRIVATE`."""
        self._sock.close()
        os.close(self._watched)

    @property
    def alive(self) -> bool:
        """Whether it still answers."""
        return self.owner == os.getpid() and not self._asking and not readable([self._watched], 0)

    def fork(self, fds: list[int], modules: tuple[str, ...]) -> Child:
        """Return a new child, which runs the worker on `fds`."""
        setup = (sys.path, sys.argv[:1], _folder(), dict(os.environ), modules)
        answer, received = self._ask(("fork", setup), fds)
        return Child(answer, received[0], lambda: self._status(answer), ours=False)

    def _status(self, pid: int) -> int | None:
        try:
            code: int | None = self._ask(("status", pid), [])[0]
        except OSError:  # the server has ended too, and its knowledge with it
            return None
        return code

    def _ask(self, request: Any, fds: list[int]) -> tuple[Any, list[int]]:
        """Send a request and wait for its answer, watching the server."""
        with self._lock:
            return self._answer(request, fds)

    def _answer(self, request: Any, fds: list[int]) -> tuple[Any, list[int]]:
        body = pickle.dumps(request, 5)
        carried = os.memfd_create("pipes-request", os.MFD_CLOEXEC)  # an environment may exceed a packet
        self._asking = True
        try:
            os.write(carried, body)
            socket.send_fds(self._sock, [b"?"], [carried, *fds])
        finally:
            os.close(carried)
        ready = readable([self._sock.fileno(), self._watched])
        data, received, _, _ = (
            socket.recv_fds(self._sock, REQUEST, 1) if self._sock.fileno() in ready else (b"", [], 0, 0)
        )
        if not data:
            raise ChildProcessError(
                f"the fork server ended with code {self._process.wait()}, perhaps by a module that it imported for the "
                'workers; try start_method="spawn"'
            )
        self._asking = False
        return pickle.loads(data), received


def _end_server(owner: int, sock: socket.socket, process: subprocess.Popen[bytes], watched: int) -> None:
    """Let a server go, at the latest when the interpreter exits; a fork of its owner has closed its copies already."""
    if owner == os.getpid():
        sock.close()
        os.close(watched)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:  # stuck, in an import say
            process.kill()
            process.wait()


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # a folder that was removed since
        return "/"


_SERVERS: list[_Server] = []


def _server() -> _Server:
    """This process's server; a forked child or a nested worker starts its own."""
    if not _SERVERS or not _SERVERS[0].alive:
        _SERVERS[:] = [_Server()]
    return _SERVERS[0]


# -- the fork server: its own side -----------------------------------------------------------------------------------


def serve(fds: list[int]) -> None:
    """Fork a worker per request, until the consumer is gone."""
    _forget_tunables()
    ignore_interrupts()
    with socket.socket(fileno=fds[0]) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(sock, fds[1])


def _serve(sock: socket.socket, consumer: int) -> None:
    statuses: dict[int, int | None] = {}  # of our children: None while one lives
    signal.signal(signal.SIGCHLD, lambda *_: _reap(statuses))

    while True:
        if sock.fileno() not in readable([sock.fileno(), consumer]):
            return
        data, received, _, _ = socket.recv_fds(sock, 1, 253)
        if not data:
            return
        carried, *worker_fds = received
        kind, argument = pickle.loads(os.pread(carried, os.fstat(carried).st_size, 0))
        os.close(carried)
        if kind == "status":
            _reap(statuses)
            socket.send_fds(sock, [pickle.dumps(statuses.pop(argument, None))], [])
            continue
        _fork_for(sock, argument, worker_fds, statuses)


def _preload(module: str) -> None:
    """Import a module of the installation: one of the user's own may change while this server lives."""
    found = importlib.util.find_spec(module)
    origin = found.origin if found is not None else None
    if origin is None or not os.path.exists(origin) or "site-packages" in origin or origin.startswith(sys.base_prefix):
        importlib.import_module(module)


def _fork_for(sock: socket.socket, setup: Any, worker_fds: list[int], statuses: dict[int, int | None]) -> None:
    path, argv, folder, environment, modules = setup
    sys.path[:] = path
    os.environ.clear()
    os.environ.update({**ONE_THREAD, **environment})
    for module in modules:
        with contextlib.suppress(BaseException):  # the worker meets the error where it needs the module
            _preload(module)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # else it may be reaped before its pidfd
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        sock.close()
        sys.argv[:] = argv
        _run_child(worker_fds, lambda fds: _work_in(folder, fds))
    statuses[pid] = None
    pidfd = os.pidfd_open(pid)
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    socket.send_fds(sock, [pickle.dumps(pid)], [pidfd])
    for fd in (pidfd, *worker_fds):
        os.close(fd)


def _work_in(folder: str, fds: list[int]) -> None:
    with contextlib.suppress(FileNotFoundError):  # a folder that was removed since
        os.chdir(folder)
    work(fds)


def _reap(statuses: dict[int, int | None]) -> None:
    """Take the statuses of our workers, and of no process that an imported module waits for itself."""
    for pid in [pid for pid, status in statuses.items() if status is None]:
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
