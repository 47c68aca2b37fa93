"""`execute` and what it returns: a `Loader`.

Laws: iterating a loader gives what iterating the pipeline gives, for any number of workers, backend, start method and
prefetch; each `iter` runs the next epoch; however a run ends, nothing outlives the loader.
"""

from __future__ import annotations

import builtins
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipes.context import Context, Cursor
from pipes.errors import check_callable, check_choice, check_flag, check_size
from pipes.execution import launch
from pipes.execution.dealing import Options
from pipes.execution.plan import Plan, divide
from pipes.execution.pool import Pool
from pipes.execution.processes import ProcessPool
from pipes.execution.schedule import Scheduler
from pipes.execution.state import Position, loaded, saved
from pipes.execution.threads import ThreadPool
from pipes.isolation import Kept
from pipes.pipeline import Pipeline, pipe

BACKENDS = ("process", "thread", "serial")


def execute(
    pipeline: Any,
    *,
    workers: int | str = 0,
    seed: int | None = None,
    epoch: int | None = None,
    backend: str = "process",
    prefetch: int = 2,
    ordered: bool = True,
    start_method: str | None = None,
    timeout: float | None = None,
    worker_init: Callable[[int], None] | None = None,
    restarts: int = 3,
    persistent: bool = True,
) -> Loader:
    """Run a pipeline with workers; the result is the same as without.

    >>> from pipes import batch, map
    >>> loader = execute(pipe(range(5), map(str), batch(2)), workers=2)
    >>> with loader:
    ...     print(list(loader), loader.epoch)
    [['0', '1'], ['2', '3'], ['4']] 1

    `workers`: how many, or "auto" for as many as this process may use processors; with 0 everything runs here.
    `seed`, `epoch`: those of the run; by default the pipeline's own (0). `backend`: "process", "thread" (for code that
    releases the GIL; there only draws through `rng` are reproducible) or "serial". `prefetch`: tasks computed ahead per
    worker. `ordered=False` yields outputs as they are ready. `start_method`: "forkserver" (the default), "spawn" or
    "fork". `timeout`: seconds to wait for one result, a worker's start included. `worker_init(number)` runs in each
    worker before anything else. `restarts`: how many workers one task may kill. `persistent`: keep workers between
    epochs.
    """
    built = pipeline if isinstance(pipeline, Pipeline) else pipe(pipeline)
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
        raise TypeError(f"`timeout` must be a number of seconds or None, got {timeout!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"`timeout` must be > 0 seconds or None, got {timeout!r}")
    if seed is not None:
        built = built.seeded(seed)
    if epoch is not None:
        built = built.at_epoch(epoch)
    options = Options(
        check_size("prefetch", prefetch),
        check_flag("ordered", ordered),
        timeout,
        check_size("restarts", restarts, least=0),
    )
    start = Start(
        _count(workers) if check_choice("backend", backend, BACKENDS) != "serial" else 0,
        backend,
        check_choice("start_method", "forkserver" if start_method is None else start_method, launch.METHODS),
        None if worker_init is None else check_callable("worker_init", worker_init),
        options.restarts,
    )
    return Loader(built, start, options, persistent=check_flag("persistent", persistent))


def _count(workers: int | str) -> int:
    if workers == "auto":
        return usable_processors()
    if isinstance(workers, str):
        raise ValueError(f'`workers` must be an integer or "auto", got {workers!r}')
    return check_size("workers", workers, least=0, advice="0 runs everything in this process")


def usable_processors() -> int:
    """Return how many processors this process may use: its affinity, or less where its cgroup has a quota."""
    quotas = builtins.filter(None, [_quota_v2(), _quota_v1()])
    return max(1, min([len(os.sched_getaffinity(0)), *builtins.map(math.floor, quotas)]))


def _quota_v2() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1() -> float | None:
    folder = Path("/sys/fs/cgroup/cpu")
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None


class Start:
    """How a pool is started."""

    def __init__(
        self,
        workers: int,
        backend: str,
        method: str,
        init: Callable[..., None] | None,
        restarts: int,
        tell: Callable[[int], Any] | None = None,  # what `init` gets as well, asked when a worker starts
    ) -> None:
        self.workers, self.backend, self.method, self.init, self.restarts = workers, backend, method, init, restarts
        self.tell = tell

    def pool(self, plan: Plan) -> Pool:
        """Start the workers."""
        if self.backend == "thread":
            return ThreadPool(plan, self.workers, init=self.init)
        return ProcessPool(
            plan, self.workers, method=self.method, init=self.init, restarts=self.restarts, tell=self.tell
        )


class _Workers:
    """The pool, started when first needed: what a finalizer can end without the loader."""

    def __init__(self, plan: Plan, start: Start, options: Options) -> None:
        self._plan, self._start, self._options = plan, start, options
        self.pool: Pool | None = None
        self._scheduler: Scheduler | None = None
        self._owner = os.getpid()

    def scheduler(self) -> Scheduler:
        """Return the schedule of the running pool; a forked child of this process starts its own."""
        if self._scheduler is None or self._owner != os.getpid():
            self.pool, self._owner = self._start.pool(self._plan), os.getpid()
            self._scheduler = Scheduler(self.pool, self._options)
        return self._scheduler

    def close(self) -> None:
        """End the pool, if there is one and it is this process's."""
        pool, self.pool, self._scheduler = self.pool, None, None
        if pool is not None and self._owner == os.getpid():
            pool.close()


class Loader:
    """An executed pipeline: iterate it once an epoch. Made by `execute`.

    `len(loader)` is the pipeline's; `epoch` is the epoch that the next `iter` runs. Use it in a `with` block, or call
    `close()`, or let it go: in each case its workers end.
    """

    def __init__(self, pipeline: Pipeline, start: Start, options: Options, *, persistent: bool) -> None:
        self.pipeline = pipeline
        self._epoch = pipeline.epoch
        self._start, self._options, self._persistent = start, options, persistent
        plan = divide(pipeline) if start.workers else Plan(None)
        self._workers = _Workers(plan, start, options) if plan.part is not None else None
        self._turn = 0
        self._closed = False
        self._running = False
        self._position: tuple[int, Cursor, int] = Position(pipeline.epoch)
        if self._workers is not None:
            weakref.finalize(self, self._workers.close)

    @property
    def seed(self) -> int:
        """The seed of every epoch."""
        return self.pipeline.seed

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter` runs."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter` runs."""
        self._epoch = check_size("epoch", epoch, least=0)
        self._position = Position(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the user stands: a small dict for JSON, to go on from behind the last output received.

        >>> loader = execute(pipe(range(5)))
        >>> for x in loader:
        ...     if x == 2:
        ...         break
        >>> again = execute(pipe(range(5)))
        >>> again.load_state_dict(loader.state_dict())
        >>> list(again), list(again)
        ([3, 4], [0, 1, 2, 3, 4])

        At any moment: before the first output, in an epoch, after its end, on a loader that was itself resumed. It does
        not depend on the number of workers, and serves any other number, and any rank of a job.
        """
        if not self._options.ordered:
            raise RuntimeError(
                "a loader with ordered=False has no state: what was received is no prefix; use ordered=True"
            )
        return saved(self.pipeline, Position(*self._position))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter` go on from a state, under its seed and epoch."""
        if self._running:
            raise RuntimeError(
                "a state cannot be loaded while an iteration is running; end it first, or make a new loader"
            )
        if not self._options.ordered:
            raise RuntimeError("a loader with ordered=False cannot go on from a state; use ordered=True")
        seed, position = loaded(self.pipeline, state)
        if position.cursor is not None and self.pipeline.one_shot:
            raise ValueError(
                f"{self.pipeline!r} holds a one-shot iterator, which cannot be replayed to go on from a state; "
                "pass from_iterable a function that makes a fresh iterator, and sample a list"
            )
        if seed != self.pipeline.seed:  # else the same value, without binding it anew
            self.pipeline = self.pipeline.seeded(seed)
        self._go_on(position)

    def _go_on(self, position: Position) -> None:
        self._turn += 1  # an iterator that has not begun yet is of another state
        self._epoch, self._position = position.epoch, position

    @property
    def _children(self) -> list[launch.Child]:
        pool = None if self._workers is None else self._workers.pool
        return [] if pool is None else pool.children

    def __getitem__(self, index: Any) -> Any:
        """Return one output, computed here, or a loader of a slice with the same options."""
        found = self.pipeline.at_epoch(self._epoch)[index]
        if not isinstance(index, slice):
            return found
        return Loader(found, self._start, self._options, persistent=self._persistent)

    def as_torch(self) -> Any:
        """Return the loader as torch's `IterableDataset`; give torch's DataLoader `batch_size=None` and no workers."""
        from pipes.drop_in.as_torch import LoaderDataset  # it is made of loaders, and needs torch

        return LoaderDataset(self)

    def __len__(self) -> int:
        return len(self.pipeline)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise RuntimeError("this loader is closed; make a new one with execute(...)")
        begin = Position(*self._position) if self._position[0] == self._epoch else Position(self._epoch)
        context = Context(self.seed, begin.epoch, globals=Kept(), runner=self._runner())
        if begin.cursor is not None:
            self._tell_of_replay(begin)
        self._epoch += 1
        self._turn += 1
        self._running = False
        self._position = begin
        return self._run(self._turn, context, begin)

    def _tell_of_replay(self, begin: Position) -> None:
        again = self.pipeline.bind(Context(self.seed, begin.epoch)).replays(begin.cursor)
        if again:
            warnings.warn(
                f"resuming replays and discards {again} elements that come from {self.pipeline.source!r}",
                stacklevel=3,
            )

    def _runner(self) -> Scheduler | None:
        if self._workers is None:
            return None
        scheduler = self._workers.scheduler()
        scheduler.abandon()  # the run before, if it is still open
        return scheduler

    def _run(self, turn: int, context: Context, begin: Position) -> Iterator[Any]:
        epoch, outputs, owner, alone = begin.epoch, begin.outputs, os.getpid(), self._workers is None
        pairs = self.pipeline.run(context, begin.cursor)
        self._running = turn == self._turn
        try:
            while True:
                if turn != self._turn or (not alone and owner != os.getpid()):
                    raise RuntimeError(self._why_ended(turn))
                pair = next(pairs, None)
                if pair is None:
                    self._position = Position(epoch + 1)
                    return
                outputs += 1
                self._position = epoch, pair[1], outputs  # once an output: a tuple, and no more
                yield pair[0]
        except BaseException as error:
            if self._workers is not None and not isinstance(error, (Exception, GeneratorExit)):
                self._workers.close()  # Ctrl-C may have come in the middle of a message
            raise
        finally:
            self._running = self._running and turn != self._turn
            pairs.close()  # type: ignore[attr-defined]  # a generator
            if not self._persistent and turn == self._turn and self._workers is not None:
                self._workers.close()

    def _why_ended(self, turn: int) -> str:
        if self._closed:
            return "this loader was closed, which ended this iteration"
        if turn == self._turn:
            return "a fork of the process that began this iteration cannot go on with it; begin anew"
        return (
            "a newer iteration of this loader has begun, or a state was loaded, which ended this one; a loader runs "
            "one epoch at a time, so make two with execute(...)"
        )

    def close(self) -> None:
        """End the workers; an iteration that is still open ends with an error at its next step."""
        self._turn += 1
        self._closed = True
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        start, shown = self._start, [repr(self.pipeline), f"workers={self._start.workers}"]
        shown += [f"backend={start.backend!r}"] if start.backend != "process" else []
        shown += [f"start_method={start.method!r}"] if start.method != "forkserver" else []
        shown += [f"epoch={self._epoch}"] if self._epoch != self.pipeline.epoch else []
        return f"execute({', '.join(shown)})"
