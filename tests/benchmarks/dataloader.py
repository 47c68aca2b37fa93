"""Measure the drop-in DataLoader beside torch's: the same script with only the import changed.

    python tests/benchmarks/dataloader.py [--workers 2] [--start-method fork] [--rows NAME ...] [--start]

Batches per second on the workloads of `transport.py`, in turn in one process, as medians and ratios; and the time to
the first batch in fresh interpreters, under each start method.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.utils.data
from transport import ROWS, Row, rate

import pipes

WANTED = {"tiny": 5.0, "uint8": 5.0, "float32": 3.0, "jpeg": 1.0}
METHODS = ("fork", "spawn", "forkserver")

FIRST_BATCH = """
import sys, time
sys.path.insert(0, {folder!r})
begun = time.perf_counter()
import torch.utils.data
from {module} import DataLoader
from workloads import Rows
if __name__ == "__main__":
    rows, imported = Rows(2000), time.perf_counter()
    loader = DataLoader(rows, 64, num_workers={workers}, multiprocessing_context={method!r})
    next(iter(loader))
    ended = time.perf_counter()
    print(ended - imported, ended - begun)
"""


def measure(row: Row, options: argparse.Namespace) -> tuple[float, float]:
    """Return the median rates of our loader and torch's."""
    dataset = row.dataset()
    given: dict[str, Any] = {"num_workers": options.workers, "persistent_workers": True}
    given |= {"multiprocessing_context": options.start_method}
    ours = pipes.DataLoader(dataset, row.batch_size, **given)
    theirs = torch.utils.data.DataLoader(dataset, row.batch_size, **given)
    loaders: list[Callable[[], Iterable[Any]]] = [lambda: ours, lambda: theirs]
    rounds = [[rate(loader, options.seconds) for loader in loaders] for _ in range(options.rounds)]
    mine, other = (statistics.median(found) for found in zip(*rounds, strict=True))
    return mine, other


def first_batch(module: str, method: str, workers: int) -> list[float]:
    """Return the seconds that a fresh interpreter takes to its first batch: from the loader, and with imports."""
    code = FIRST_BATCH.format(folder=str(Path(__file__).parent), module=module, method=method, workers=workers)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"  # a file, since torch's spawned workers import it again
        script.write_text(code, encoding="utf-8")
        printed = subprocess.run([sys.executable, "-W", "ignore", script], check=True, capture_output=True, text=True)
    return [float(x) for x in printed.stdout.split()]


def bench_start(options: argparse.Namespace) -> None:
    for method in METHODS:
        rounds = [
            [*first_batch("pipes", method, options.workers), *first_batch("torch.utils.data", method, options.workers)]
            for _ in range(options.rounds)
        ]
        ours, our_all, theirs, their_all = (statistics.median(found) for found in zip(*rounds, strict=True))
        verdict = "ok" if ours <= theirs else "MISSED"
        line = f"first batch, {method:10} pipes {ours:6.3f} s   x torch {ours / theirs:5.2f} (<= 1.0) {verdict:8}"
        print(f"{line} with imports {our_all:5.2f} s, x torch {our_all / their_all:5.2f}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start-method", default="fork", choices=METHODS)
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=[], help="only rows whose name holds one of these")
    parser.add_argument("--start", action="store_true", help="only the time to the first batch")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    for row in () if options.start else ROWS:
        if options.rows and not any(part in row.name for part in options.rows):
            continue
        ours, theirs = measure(row, options)
        wanted = next((least for part, least in WANTED.items() if part in row.name), None)
        verdict = "" if wanted is None else f"(>= {wanted}) {'ok' if ours >= wanted * theirs else 'MISSED'}"
        print(f"{row.name:22} pipes {ours:9.1f} batches/s   x torch {ours / theirs:6.2f} {verdict}", flush=True)
    if options.start or not options.rows:
        bench_start(options)


if __name__ == "__main__":
    main()
