"""Measure what the serial run costs, each time beside what a user would write or use instead.

    python tests/benchmarks/serial.py [--quick]

Contestants take turns in one process and the medians are compared, so that a busy machine slows all of them alike.
"""

import argparse
import builtins
import functools
import itertools
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import more_itertools
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pipes as p

type Job = Callable[[], Iterable[Any]]

ROWS = 100_000
REPETITIONS = 7


def drained(job: Job) -> float:
    """Return the seconds that it takes to make and exhaust an iterable."""
    start = time.perf_counter()
    deque(job(), maxlen=0)
    return time.perf_counter() - start


def medians(*jobs: Job, repetitions: int) -> list[float]:
    """Return each job's median; the jobs take turns, after a warm-up of each."""
    for job in jobs:
        drained(job)
    rounds = [[drained(job) for job in jobs] for _ in range(repetitions)]
    return [statistics.median(times) for times in builtins.zip(*rounds, strict=True)]


def report(what: str, value: float, unit: str, wanted: str, *, met: bool) -> None:
    """Print one result, and whether it is what we want."""
    print(f"{what:66} {value:10.2f} {unit:6} want {wanted:8} {'ok' if met else 'MISSED'}")


# -- (a) map and batch beside a generator written by hand --------------------------------------------------------------


def increment(row: tuple[Any, int]) -> tuple[Any, int]:
    """Do next to nothing: 0.1 us."""
    return row[0] + 1, row[1]


def scale(row: tuple[Any, int]) -> tuple[Any, int]:
    """Do the least that a real map does to a row: 0.8 us."""
    return row[0] * 2.0, row[1]


type Rows_ = list[tuple[Any, int]]
type Change = Callable[[tuple[Any, int]], tuple[Any, int]]


def by_hand(change: Change, rows: Rows_, size: int) -> Iterator[Rows_]:
    """Map and batch as one would without a library."""
    block = []
    for row in rows:
        block.append(change(row))
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


def bench_map_batch(repetitions: int) -> None:
    arrays: Rows_ = list(zip(np.random.default_rng(0).random((ROWS, 16), np.float32), range(ROWS), strict=True))
    ints: Rows_ = [(i, i) for i in range(ROWS)]
    for what, change, rows, wanted in (
        ("rows of 16 floats", scale, arrays, 1.5),
        ("rows of ints", increment, ints, None),
    ):
        for size in (256, 64):
            pipeline = p.pipe(p.from_map(rows), p.map(change), p.batch(size))
            hand = functools.partial(by_hand, change, rows, size)
            ours, theirs = medians(functools.partial(iter, pipeline), hand, repetitions=repetitions)
            ratio, extra = ours / theirs, (ours - theirs) / (ROWS / size) * 1e6
            least = f"<= {wanted}" if wanted and size == 256 else "-"
            met = not (wanted and size == 256) or ratio <= wanted
            report(f"{what}: map + batch({size}), time over a hand-written generator's", ratio, "x", least, met=met)
            most = "<= 50" if size == 64 else "-"
            met = size != 64 or extra <= 50
            report(f"{what}: map + batch({size}), more than by hand, per output", extra, "us", most, met=met)


# -- (b), (c) beside DataLoader ----------------------------------------------------------------------------------------


class Rows(Dataset[tuple[Any, Any]]):
    """A map-style data set as users write them."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.x[i], self.y[i]


def bench_dataloader(repetitions: int) -> None:
    x, y = np.random.default_rng(0).random((ROWS, 32), np.float32), np.arange(ROWS)
    tensors = torch.from_numpy(x), torch.from_numpy(y)
    stages = p.sample(p.shuffled()), p.batch(256), p.collate()

    def compared(what: str, pipeline: p.Pipeline, dataset: Dataset[Any], wanted: float) -> None:
        loader: Job = lambda: DataLoader(dataset, batch_size=256, shuffle=True)  # noqa: E731
        ours, theirs = medians(lambda: pipeline, loader, repetitions=repetitions)
        batches = -(-ROWS // 256)
        ratio = theirs / ours
        report(f"{what}: batches/s over DataLoader's", ratio, "x", f">= {wanted:g}", met=ratio >= wanted)
        print(f"    ours {batches / ours:,.0f} batches/s, DataLoader {batches / theirs:,.0f}")

    theirs = TensorDataset(*tensors)
    compared("from_arrays(tensors), TensorDataset", p.pipe(p.from_arrays(*tensors), *stages), theirs, 20)
    compared("from_arrays(NumPy), TensorDataset", p.pipe(p.from_arrays(x, y), *stages), theirs, 20)
    compared("from_map(TensorDataset), the same Dataset", p.pipe(p.from_map(theirs), *stages), theirs, 20)
    for kind, rows in {"tensors": Rows(*tensors), "NumPy": Rows(x, y)}.items():
        compared(f"from_map(rows of {kind}), the same Dataset", p.pipe(p.from_map(rows), *stages), rows, 1)


# -- (d) each stage beside its counterpart -----------------------------------------------------------------------------


def same(x: int) -> int:
    """Do nothing."""
    return x


def odd(x: int) -> bool:
    """Choose every other number."""
    return x % 2 == 1


def twice(x: int) -> tuple[int, int]:
    """Make two of one."""
    return x, x


def shuffled_chunks(xs: Iterable[int]) -> Iterator[int]:
    """Shuffle within chunks, as one would by hand."""
    for chunk in more_itertools.chunked(xs, 256):
        random.shuffle(chunk)
        yield from chunk


def counterparts(xs: list[int], lists: list[list[int]]) -> list[tuple[str, p.Stage, list[Any], Job]]:
    """Return name, stage, input, and what does the same without us."""
    half, quarters = len(xs) // 2, [xs[i::4] for i in range(4)]
    return [
        ("map(same)", p.map(same), xs, lambda: builtins.map(same, xs)),
        ("filter(odd)", p.filter(odd), xs, lambda: builtins.filter(odd, xs)),
        ("flat_map(twice)", p.flat_map(twice), xs, lambda: itertools.chain.from_iterable(builtins.map(twice, xs))),
        ("enumerate()", p.enumerate(), xs, lambda: builtins.enumerate(xs)),
        ("sample(shuffled())", p.sample(p.shuffled()), xs, lambda: random.sample(xs, len(xs))),
        ("shuffle_buffer(256)", p.shuffle_buffer(256), xs, lambda: shuffled_chunks(xs)),
        ("take(half)", p.take(half), xs, lambda: itertools.islice(xs, half)),
        ("skip(half)", p.skip(half), xs, lambda: itertools.islice(xs, half, None)),
        ("repeat(2)", p.repeat(2), xs, lambda: more_itertools.ncycles(xs, 2)),
        ("batch(64)", p.batch(64), xs, lambda: more_itertools.chunked(xs, 64)),
        ("unbatch() of 64", p.unbatch(), lists, lambda: itertools.chain.from_iterable(lists)),
        ("shard_by_rank(0, 2)", p.shard_by_rank(0, 2), xs, lambda: itertools.islice(xs, 0, None, 2)),
        ("shard_by_worker(4)", p.shard_by_worker(4), xs, lambda: more_itertools.roundrobin(*quarters)),
        ("collate(numpy) of 64", p.collate(to="numpy"), lists, lambda: builtins.map(np.array, lists)),
        ("collate() of 64", p.collate(), lists, lambda: builtins.map(torch.tensor, lists)),
    ]


def bench_stages(repetitions: int) -> None:
    xs = list(range(20_000))
    lists = list(more_itertools.chunked(xs, 64))

    def row(name: str, *jobs: Job | None) -> None:
        times = iter(medians(*[job for job in jobs if job is not None], repetitions=repetitions))
        cells = ["-" if job is None else f"{next(times) / len(xs) * 1e9:,.0f}" for job in jobs]
        print(f"{name:24}" + "".join(f"{cell:>13}" for cell in cells))

    print(f"\n{'ns per input element':24}{'alone':>13}{'on a list':>13}{'on a stream':>13}{'counterpart':>13}")
    row("no stage", None, lambda: p.pipe(xs), lambda: p.pipe(p.from_iterable(xs)), lambda: xs)
    for name, stage, items, counterpart in counterparts(xs, lists):
        only_random = isinstance(stage, p.sample)
        on_list = p.pipe(p.from_map(items), stage)
        on_stream = None if only_random else p.pipe(p.from_iterable(items), stage)
        given = (lambda items=items: items) if only_random else (lambda items=items: iter(items))
        row(
            name,
            lambda stage=stage, given=given: stage(given()),  # type: ignore[misc]
            lambda on_list=on_list: on_list,  # type: ignore[misc]
            None if on_stream is None else lambda on_stream=on_stream: on_stream,  # type: ignore[misc]
            counterpart,
        )
    row("concat of two", None, lambda: p.concat(xs, xs), None, lambda: itertools.chain(xs, xs))
    row("zip of two", None, lambda: p.zip(xs, xs), None, lambda: builtins.zip(xs, xs, strict=True))


# -- (e) the shuffle of a billion --------------------------------------------------------------------------------------


def bench_shuffled(repetitions: int) -> None:
    n = 10**9
    first = []
    for epoch in range(3 + repetitions):
        start = time.perf_counter()
        p.shuffled().bind(n, (epoch, 1))(np.array([0]))
        first.append(time.perf_counter() - start)
    tracemalloc.start()
    p.shuffled().bind(n, (99, 1))(np.array([0]))
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    longest = max(first) * 1e3
    print()
    report("shuffled(), n = 1e9: first index (slowest of all)", longest, "ms", "< 50", met=longest < 50)
    report("shuffled(), n = 1e9: memory for the first index", peak, "MB", "< 10", met=peak < 10)
    for size in (64, 256, 4096, 1 << 16):
        at = p.shuffled().bind(n, (7, 7))
        count = 1 << 20

        def in_order(at: Any = at, size: int = size, count: int = count) -> Iterator[npt.NDArray[np.int64]]:
            for begin in range(0, count, size):
                yield at(np.arange(begin, begin + size))

        (seconds,) = medians(in_order, repetitions=repetitions)
        speed = count / seconds / 1e6
        report(f"shuffled(), n = 1e9: in order, {size} at a time", speed, "M/s", ">= 5", met=speed >= 5)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the serial run costs.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    repetitions = 3 if parser.parse_args().quick else REPETITIONS
    bench_map_batch(repetitions)
    bench_dataloader(repetitions)
    bench_shuffled(repetitions)
    bench_stages(repetitions)


if __name__ == "__main__":
    main()
