"""Measure batches per second with workers, side by side with torch's DataLoader and with our own serial run.

    python tests/benchmarks/transport.py [--peers] [--workers 2] [--start-method forkserver] [--rows NAME ...]

Every figure of a row is measured in turn, several times over, in one process; the table shows medians and ratios.
`--peers` adds the PyPI packages dataloader-rs and spdl-core where they are installed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.utils.data
from workloads import Fields, Images, Jpegs, Rows, Tokens

from pipes import batch, collate, execute, from_map, pipe


@dataclass(frozen=True)
class Row:
    """A workload, its batch size and what the project wants of it."""

    name: str
    dataset: Callable[[], Any]
    batch_size: int
    least_of_torch: float
    least_of_serial: float | None = None


ROWS = [
    Row("tiny rows 64x16", Rows, 64, 10, 1.0),
    Row("uint8 64x3x224x224", lambda: Images("uint8"), 64, 8, 0.9),
    Row("float32 64x3x224x224", lambda: Images("float32"), 64, 4, 1.5),
    Row("tokens 32x2048", Tokens, 32, 5, 1.0),
    Row("jpeg 64x3x224x224", Jpegs, 64, 1.0, 1.8),
    Row("20 fields x 128", Fields, 128, 4),
]


def rate(epoch: Callable[[], Iterable[Any]], seconds: float) -> float:
    """Return batches per second over about `seconds`, without the first batches of each epoch."""
    count, spent = 0, 0.0
    while spent < seconds:
        batches = iter(epoch())
        if not list(itertools.islice(batches, 4)):
            raise ValueError("an epoch has too few batches to measure")
        begun = time.perf_counter()
        for _ in batches:
            count += 1
            if spent + time.perf_counter() - begun > seconds:
                break
        spent += time.perf_counter() - begun
        del batches
    return count / spent


def measure(row: Row, options: argparse.Namespace) -> dict[str, float]:
    """Return the median rate of each contender."""
    dataset, workers = row.dataset(), options.workers
    pipeline = pipe(from_map(dataset), batch(row.batch_size), collate())
    theirs = torch.utils.data.DataLoader(
        dataset, row.batch_size, num_workers=workers, persistent_workers=True, multiprocessing_context="fork"
    )
    contenders: dict[str, Callable[[], Iterable[Any]]] = {}
    with execute(pipeline, workers=workers, start_method=options.start_method) as loader:
        contenders["pipes"] = lambda: loader
        contenders["serial"] = lambda: pipeline
        contenders["torch"] = lambda: theirs
        if options.peers:
            from peers import peers_of

            contenders |= peers_of(dataset, row.batch_size, workers)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, epoch in contenders.items():
                rates[name].append(rate(epoch, options.seconds))
    return {name: statistics.median(found) for name, found in rates.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start-method", default="forkserver", help="ours; DataLoader's workers are forked")
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=[], help="only rows whose name holds one of these")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    print(f"batches/s with {options.workers} workers, ours started by {options.start_method}, DataLoader's by fork;")
    print("x torch and x serial are ratios, in brackets what is wanted")
    for row in ROWS:
        if options.rows and not any(part in row.name for part in options.rows):
            continue
        found = measure(row, options)
        ours = found.pop("pipes")
        serial = f"(>= {row.least_of_serial})" if row.least_of_serial else ""
        line = f"{row.name:22} pipes {ours:9.1f}   x torch {ours / found['torch']:6.2f} (>= {row.least_of_torch})"
        line += f"   x serial {ours / found['serial']:5.2f} {serial}"
        extra = {k: v for k, v in found.items() if k not in ("torch", "serial")}
        line += "".join(f"   x {name} {ours / value:5.2f}" for name, value in extra.items())
        print(line, flush=True)


if __name__ == "__main__":
    main()
