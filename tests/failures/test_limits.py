"""Tight limits of the machine: few descriptors, and no room in /dev/shm."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import run_script

every_process = pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])

HELD = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

def make(i):
    return np.full((100, 100), i), np.full(5, i), str(i) * 5000

pipeline = p.pipe(range(300), p.map(make), p.batch(1))
with p.execute(pipeline, workers=4, start_method=METHOD) as loader:
    for _ in range(2):
        held = list(loader)
        for i, [(array, few, text)] in enumerate(held):
            assert (array == i).all() and (few == i).all() and text == str(i) * 5000
        assert len(os.listdir("/proc/self/fd")) < 64
held[0][0][0][:] = 1
print("held", len(held))
"""


@every_process
def test_few_descriptors_suffice_for_many_batches(method: str, tmp_path: Path) -> None:
    assert run_script(HELD, folder=tmp_path, method=method) == "held 300\n"


SHARES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
lists = {f"column {i}": [str(j) for j in range(10_000)] for i in range(60)}
with p.execute(p.pipe(range(60), p.map(lambda i: lists[f"column {i}"][i])), workers=2, start_method=METHOD) as loader:
    print(list(loader) == [str(i) for i in range(60)])
"""


@every_process
def test_few_descriptors_suffice_for_many_long_lists(method: str, tmp_path: Path) -> None:
    assert run_script(SHARES, folder=tmp_path, method=method) == "True\n"


NOWHERE = """
def shared_places(_=None):
    return [line for line in open("/proc/self/maps") if "/dev/shm" in line] + sorted(os.listdir("/dev/shm"))

before = shared_places()
table = p.share(np.arange(10**6))
items = [str(i) for i in range(20_000)]
big = np.arange(10**6)

def work(i):
    return np.full(10**5, table[i] + big[i] + int(items[i])), shared_places()

with p.execute(p.pipe(range(50), p.map(work)), workers=2, start_method=METHOD) as loader:
    for array, seen in loader:
        assert seen == before and shared_places() == before, (seen, before)
print(array[0])
"""


@every_process
def test_nothing_is_placed_in_dev_shm(method: str, tmp_path: Path) -> None:
    assert run_script(NOWHERE, folder=tmp_path, method=method) == "147\n"


HOARD = """
pipeline = p.pipe(range(1200), p.map(lambda i: np.full(1 << 17, i % 256, np.uint8)))
with p.execute(pipeline, workers=1, start_method=METHOD) as loader:
    held = list(loader)
assert all((x == i % 256).all() for i, x in enumerate(held))
held[7][:] = 3
print(len(held))
"""


def test_whoever_holds_very_many_batches_gets_copies(tmp_path: Path) -> None:
    assert run_script(HOARD, folder=tmp_path, method="fork") == "1200\n"
