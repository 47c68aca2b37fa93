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
