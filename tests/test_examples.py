"""Every example runs, in a process of its own; the training run reaches its accuracy and repeats itself exactly."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "train_digits.py"))
def test_an_example_runs_from_any_folder_and_repeats_itself(name: str, tmp_path: Path) -> None:
    out = run(name, cwd=tmp_path)
    assert out.strip()
    assert run(name, cwd=tmp_path) == out


def test_plain_python_needs_no_torch(tmp_path: Path) -> None:
    code = f"import runpy, sys; runpy.run_path({str(EXAMPLES / 'plain_python.py')!r}, run_name='__main__'); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=60)


def test_training_prints_the_same_losses_twice(tmp_path: Path) -> None:
    first, second = (run("train_digits.py", "--epochs", "2", "--seed", "3", cwd=tmp_path) for _ in range(2))
    assert len(re.findall(r"loss \d+\.\d{6}", first)) == 2
    assert first == second
    other = run("train_digits.py", "--epochs", "2", "--seed", "4", cwd=tmp_path)
    assert other != first


def test_training_reaches_95_percent_within_a_minute(tmp_path: Path) -> None:
    start = time.perf_counter()
    out = run("train_digits.py", cwd=tmp_path)
    took = time.perf_counter() - start
    assert float(re.findall(r"accuracy ([\d.]+) %", out)[-1]) >= 95
    assert took < 60


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_drop_in_prints_the_losses_of_torchs_loader(workers: str, tmp_path: Path) -> None:
    ours, torchs = (
        run("dataloader_drop_in.py", "--loader", loader, "--workers", workers, "--epochs", "2", cwd=tmp_path)
        for loader in ("pipes", "torch")
    )
    assert len(set(re.findall(r"loss (\d+\.\d{9})", ours))) == 2
    assert ours == torchs


def test_drop_in_training_gets_better(tmp_path: Path) -> None:
    out = run("dataloader_drop_in.py", "--epochs", "4", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses == sorted(losses, reverse=True)
    assert float(re.findall(r"accuracy ([\d.]+) %", out)[-1]) >= 80


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_custom_batch_is_pinned_where_there_is_an_accelerator(workers: str, tmp_path: Path) -> None:
    first, *lines = run("custom_batch_pin.py", "--workers", workers, cwd=tmp_path).splitlines()
    expected = "not pinned" if first == "accelerator: none" else "pinned"
    assert [line.partition(", mean")[0] for line in lines] == [f"Batch of {n}: {expected}" for n in [256] * 7 + [5]]


@pytest.mark.parametrize("seed", ["0", "1"])
def test_weighted_classes_are_about_balanced(seed: str, tmp_path: Path) -> None:
    out = run("weighted_classes.py", "--seed", seed, "--size", "2000", cwd=tmp_path)
    counts = {line[:34].strip(): [int(n) for n in line[34:].split()] for line in out.splitlines()}
    assert counts.pop("class") == list(range(10))
    assert counts["DataLoader, shuffled"] == counts["pipe, shuffled"] == [178, 10, 9, 10, 10, 10, 10, 9, 9, 9]
    for way in ("DataLoader, WeightedRandomSampler", "pipe, weighted"):
        assert sum(counts[way]) == 2000
        assert all(0.07 <= n / 2000 <= 0.13 for n in counts[way]), f"{way}: {counts[way]}"  # 4.5 standard deviations
