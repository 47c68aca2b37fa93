"""Measure a fresh interpreter's time to its first batch, beside torch's DataLoader, and the start of later epochs.

    python tests/benchmarks/start.py [--runs 5]

Each figure is the median over fresh interpreters, started in turn; both load a NumPy-only data set with two workers.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

DATASET = """
import sys, time
import numpy as np

class Rows:
    def __init__(self): self.x = np.random.default_rng(0).random((4096, 16))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i]
"""

OURS = (
    DATASET
    + """
from pipes import batch, collate, execute, from_map, pipe
loader = execute(pipe(from_map(Rows()), batch(64), collate(to="numpy")), workers=2)
for b in loader:
    print("first", flush=True)
    break
for _ in loader: pass
begun = time.perf_counter()
next(iter(loader))
print(time.perf_counter() - begun, flush=True)
"""
)

THEIRS = (
    DATASET
    + """
if __name__ == "__main__":
    from torch.utils.data import DataLoader
    loader = DataLoader(Rows(), 64, num_workers=2, multiprocessing_context="forkserver", persistent_workers=True)
    for b in loader:
        print("first", flush=True)
        break
    for _ in loader: pass
    begun = time.perf_counter()
    next(iter(loader))
    print(time.perf_counter() - begun, flush=True)
"""
)


def run(path: str) -> tuple[float, float]:
    """Return the seconds to the first batch and those from a later epoch's start to its first batch."""
    begun = time.perf_counter()
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None or process.stdout.readline() != "first\n":
            raise RuntimeError(f"{path} printed no first batch")
        first = time.perf_counter() - begun
        later = float(process.stdout.readline())
    return first, later


def main() -> None:
    """Print the table."""
    import tempfile
    from pathlib import Path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    scripts = {"pipes": OURS, "torch": THEIRS}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in scripts}
    for name, text in scripts.items():
        (folder / f"first_batch_of_{name}.py").write_text(text)
    for _ in range(options.runs):
        for name in scripts:
            found[name].append(run(str(folder / f"first_batch_of_{name}.py")))
    first = {name: statistics.median(f for f, _ in runs) for name, runs in found.items()}
    later = {name: statistics.median(s for _, s in runs) for name, runs in found.items()}
    print(f"fresh interpreter to first batch: pipes {first['pipes']:.3f} s, torch {first['torch']:.3f} s")
    print(f"  ratio {first['pipes'] / first['torch']:.2f} (wanted <= 0.35)")
    print(print(f"second epoch's first batch: pipes {later['pipes'] * 1e3:.1f} ms (wanted <= 5)"))


if __name__ == "__main__":
    main()
