"""Measure what a resume costs beside a fresh start, and what it costs to know at any moment where one stands.

    python tests/benchmarks/resume.py [--samples 10_000_000] [--gigabytes 1] [--runs 7] [--only random tracking lines]

Random access is measured beside torchdata's StatefulDataLoader where that is installed (`pip install torchdata`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from workloads import Rows

from pipes import (
    batch,
    collate,
    enumerate,
    execute,
    filter,
    from_iterable,
    from_lines,
    from_map,
    map,
    pipe,
    sample,
    shuffled,
)
from pipes.context import Context
from pipes.heads import Head, PositionHead
from pipes.nodes import Indexed

BATCH = 1000


def report(what: str, value: float, unit: str, wanted: str = "", *, met: bool = True) -> None:
    """Print one result, and whether it is what we want."""
    verdict = f"want {wanted:9} {'ok' if met else 'MISSED'}" if wanted else ""
    print(f"{what:66} {value:10.3f} {unit:6} {verdict}".rstrip(), flush=True)


def seconds(job: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    job()
    return time.perf_counter() - begun


def medians(runs: int, *jobs: Callable[[], Any]) -> list[float]:
    """Return each job's median time; the jobs take turns, after a warm-up of each."""
    for job in jobs:
        job()
    rounds = [[seconds(job) for job in jobs] for _ in range(runs)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


# -- random access -----------------------------------------------------------------------------------------------------


class Samples:
    """Many samples that cost no memory, with bulk access."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return several samples."""
        return list(np.asarray(indices, np.float32)[:, None] + np.arange(16, dtype=np.float32))


def bench_random_access(samples: int, runs: int) -> None:
    """Compare the time to the first batch, fresh and at 90 %."""
    dataset = Samples(samples)
    pipeline = pipe(from_map(dataset), sample(shuffled()), batch(BATCH), collate(to="numpy"))
    cut = samples * 9 // 10 // BATCH
    with execute(pipeline) as loader:
        deque(itertools.islice(loader, cut), maxlen=0)
        state = loader.state_dict()

    def first(workers: int, *, fresh: bool) -> Any:
        with execute(pipeline, workers=workers) as loader:
            if not fresh:
                loader.load_state_dict(state)
            return next(iter(loader))

    expected = pipeline[cut]
    print(f"{samples:,} samples, shuffled, in batches of {BATCH}; resumed at 90 %")
    for workers in (0, 2):
        if not np.array_equal(first(workers, fresh=False), expected):
            raise AssertionError("the resumed batch is not the one that follows")
        fresh, again = medians(runs, lambda: first(workers, fresh=True), lambda: first(workers, fresh=False))  # noqa: B023
        report(f"  pipes, {workers} workers: fresh start to first batch", fresh * 1e3, "ms")
        report(f"  pipes, {workers} workers: resumed, to first batch", again * 1e3, "ms")
        report("    resumed over fresh", again / fresh, "x", "<= 1.2", met=again / fresh <= 1.2)
    if importlib.util.find_spec("torchdata") is None:
        print("  torchdata is not installed")
        return
    for workers in (0, 2):
        fresh, again = stateful_dataloader(dataset, cut, workers, runs=max(1, runs // 3))
        report(f"  torchdata, {workers} workers: fresh start to first batch", fresh * 1e3, "ms")
        report(f"  torchdata, {workers} workers: resumed, to first batch", again * 1e3, "ms")
        report("    resumed over fresh", again / fresh, "x")


def stateful_dataloader(dataset: Samples, cut: int, workers: int, runs: int) -> list[float]:
    """Return the same two times of torchdata's loader."""
    stateful = importlib.import_module("torchdata.stateful_dataloader")

    def made() -> Any:
        context = "fork" if workers else None
        return stateful.StatefulDataLoader(
            dataset, BATCH, shuffle=True, num_workers=workers, collate_fn=np.stack, multiprocessing_context=context
        )

    loader = made()
    deque(itertools.islice(loader, cut), maxlen=0)
    state = loader.state_dict()

    def first(*, fresh: bool) -> Any:
        loader = made()
        if not fresh:
            loader.load_state_dict(state)
        return next(iter(loader))

    return medians(runs, lambda: first(fresh=True), lambda: first(fresh=False))


# -- tracking ----------------------------------------------------------------------------------------------------------


def untracked(head: Head) -> Iterator[Any]:
    """Run a head as `Head.run` does, without cursors."""
    for unit, payload, *_ in head.payloads(None):
        yield from head.outputs(unit, payload)


def head_of(pipeline: Any) -> Head:
    """Return the head that a whole pipeline is."""
    node = pipeline.bind(Context())
    head = PositionHead(node) if isinstance(node, Indexed) else node
    if not isinstance(head, Head):
        raise TypeError(f"{pipeline!r} must be one head")
    return head


def drain(iterable: Iterable[Any]) -> None:
    deque(iterable, maxlen=0)


def same(x: Any) -> Any:
    return x


def bench_tracking(runs: int) -> None:
    """Compare runs with cursors and without, and with a loader around them and without."""
    size = 200_000
    print("what it costs to know where one stands")
    elements = pipe(range(size), map(same), filter(always))
    head = head_of(elements)
    without, cursors = medians(runs, lambda: drain(untracked(head)), lambda: drain(head.run()))
    cost = (cursors - without) / size * 1e6
    report("  random access: a cursor for each element", cost, "us", "<= 0.2", met=cost <= 0.2)
    stream = pipe(from_iterable(range(size)), enumerate())
    for name, pipeline in {"random access": elements, "stream": stream}.items():
        loader = execute(pipeline, backend="serial")
        plain, kept = medians(runs, lambda: drain(pipeline), lambda: drain(loader))  # noqa: B023
        cost = (kept - plain) / size * 1e6
        report(f"  {name}: a loader that keeps the last cursor", cost, "us", "<= 0.2", met=cost <= 0.2)
    rows = pipe(from_map(Rows()), batch(64), collate(to="numpy"))
    outputs = len(rows)
    of_rows = head_of(rows)
    loader = execute(rows, backend="serial")
    without, cursors, plain, kept = medians(
        runs,
        lambda: drain(untracked(of_rows)),
        lambda: drain(of_rows.run()),
        lambda: drain(rows),
        lambda: drain(loader),
    )
    share = (cursors - without + kept - plain) / plain * 100
    report("  tiny rows 64x16: cursors and loader, of the time of a serial run", share, "%", "< 2", met=share < 2)
    report("  tiny rows 64x16: a batch", plain / outputs * 1e6, "us")
    (saving,) = medians(runs, lambda: [loader.state_dict() for _ in range(1000)])
    report("  state_dict()", saving / 1000 * 1e6, "us")


def always(_: Any) -> bool:
    return True


# -- lines -------------------------------------------------------------------------------------------------------------


def bench_lines(gigabytes: float, runs: int) -> None:
    """Compare the time to the first line, fresh and at 90 % of a large file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines.txt")
        block = "".join(f"line {i} of a file of some size, which is read line by line\n" for i in range(100_000))
        blocks = max(1, round(gigabytes * 1e9 / len(block)))
        with path.open("w") as file:
            for _ in range(blocks):
                file.write(block)
        pipeline = pipe(from_lines(path), map(str.strip), batch(64))
        print(f"{path.stat().st_size / 1e9:.2f} GB of lines; resumed at 90 %")
        target = blocks * 100_000 * 9 // 10 // 64
        with execute(pipeline, backend="serial") as loader:
            begun = time.perf_counter()
            deque(itertools.islice(loader, target), maxlen=0)
            report("  reading that far, without a resume", time.perf_counter() - begun, "s")
            state = loader.state_dict()

        def first(workers: int, *, fresh: bool) -> Any:
            with execute(pipeline, workers=workers) as loader:
                if not fresh:
                    loader.load_state_dict(state)
                return next(iter(loader))

        lines = [f"line {i % 100_000} of" for i in (target * 64, target * 64 + 63)]
        for workers in (0, 2):
            found = first(workers, fresh=False)
            if not (found[0].startswith(lines[0]) and found[-1].startswith(lines[1])):
                raise AssertionError(f"the resumed batch is not the one that follows: {found[0]}")
            fresh, again = medians(runs, lambda: first(workers, fresh=True), lambda: first(workers, fresh=False))  # noqa: B023
            report(f"  {workers} workers: fresh start to first batch", fresh * 1e3, "ms")
            report(f"  {workers} workers: resumed, to first batch", again * 1e3, "ms")
            report("    resumed over fresh", again / fresh, "x", "<= 2", met=again / fresh <= 2)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=["random", "tracking", "lines"])
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    if "random" in options.only:
        bench_random_access(options.samples, options.runs)
    if "tracking" in options.only:
        bench_tracking(options.runs)
    if "lines" in options.only:
        bench_lines(options.gigabytes, options.runs)


if __name__ == "__main__":
    main()
