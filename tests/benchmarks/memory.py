"""Measure the memory of the whole process tree: proportional set size, each shared page counted once.

    python tests/benchmarks/memory.py [--workers 4] [--gigabytes 2]

Each case runs in a fresh interpreter, with workers that have touched every element; "alone" is the parent without any.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

PRELUDE = """
import os, sys, tempfile, itertools
import numpy as np
import psutil

def pss():
    me = psutil.Process()
    total = 0
    for p in [me, *me.children(recursive=True)]:
        try:
            total += p.memory_full_info().pss
        except psutil.NoSuchProcess:
            pass
    return total / 2**20

workers, gigabytes = int(sys.argv[1]), float(sys.argv[2])
"""

RECORDS = """
def records():
    return [{"id": i, "name": f"sample {i}", "label": i % 10} for i in range(2_000_000)]

class Records:
    def __init__(self, items): self.items = items
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]["label"]
"""

ARRAY = """
class Array:
    def __init__(self, x): self.x = x
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return int(self.x[i, ::512].sum())

def array():
    return np.ones((int(gigabytes * 2**30) // 2**20, 2**20), np.uint8)
"""

OURS = """
from pipes import batch, collate, execute, from_map, pipe, share
data = {make}
if isinstance(data, np.ndarray): data.max()  # the parent alone has touched it as well
alone = pss()
with execute(pipe(from_map({wrap}(data)), batch({batch}), collate(to="numpy")), workers=workers{how}) as loader:
    for b in loader: pass
    print(alone, pss())
"""

THEIRS = """
import torch, warnings
warnings.filterwarnings("ignore")
from torch.utils.data import DataLoader
data = {make}
alone = pss()
loader = DataLoader({wrap}(data), {batch}, num_workers=workers, persistent_workers=True, multiprocessing_context="fork")
for b in loader: pass
print(alone, pss())
"""

FLAT = """
import gc, threading
from pipes import batch, collate, execute, from_map, pipe
rows = np.random.default_rng(0).random((20_000, 64))
me = psutil.Process()
def state(): return pss(), len(os.listdir("/proc/self/fd")), threading.active_count()
with execute(pipe(from_map(rows), batch(64), collate(to="numpy")), workers=workers) as loader:
    for _ in range(20):
        for b in loader: pass
    before = state()
    for _ in range(50):
        for b in loader: pass
    print(*before, *state())
"""


def run(script: str, *arguments: object) -> list[float]:
    """Run a script in a fresh interpreter and return the numbers that it prints."""
    command = [sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [float(x) for x in done.stdout.split()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=2)
    options = parser.parse_args()
    size = options.workers, options.gigabytes
    lists = {"make": "records()", "wrap": "Records", "batch": 1000}
    arrays = {"make": "array()", "wrap": "Array", "batch": 16}
    mapped = "np.memmap(os.path.join(tempfile.mkdtemp(), 'x'), np.uint8, 'w+', shape=array().shape)"
    cases = [
        ("2 million dicts, pipes", RECORDS + OURS.format(**lists, how=""), "<= 1.5"),
        ("2 million dicts, torch (fork)", RECORDS + THEIRS.format(**lists), ""),
        ("an array, pipes", ARRAY + OURS.format(**arrays, how=""), "<= 2.15"),
        ("the array under fork", ARRAY + OURS.format(**arrays, how=', start_method="fork"'), "<= 1.15"),
        ("the array by share()", ARRAY + OURS.format(**{**arrays, "make": "share(array())"}, how=""), "<= 1.15"),
        ("a memmap", ARRAY + OURS.format(**{**arrays, "make": mapped}, how=""), "<= 1.15"),
    ]
    print(f"memory of the process tree with {options.workers} workers, {options.gigabytes:g} GB arrays")
    for name, script, wanted in cases:
        alone, together = run(script, *size)
        print(f"{name:30} alone {alone:7.0f} MB, with workers {together:7.0f} MB: {together / alone:5.2f} x  {wanted}")
    before = run(FLAT, *size)
    print(
        f"50 epochs: memory {before[0]:.0f} -> {before[3]:.0f} MB, descriptors {before[1]:.0f} -> {before[4]:.0f}, "
        f"threads {before[2]:.0f} -> {before[5]:.0f}"
    )


if __name__ == "__main__":
    main()
