"""The README is run: each of its ```python blocks, in order, in one namespace. Its `>>>` examples are doctests."""

import re
from pathlib import Path
from typing import Any

import pytest

import pipes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = [code for language, code in BLOCKS if language == "python" and ">>>" not in code]
    assert len(plain) >= 3
    namespace: dict[str, Any] = {"__name__": "readme"}
    for number, code in enumerate(plain):
        exec(compile(code, f"README.md, python block {number}", "exec"), namespace)


def test_blocks_are_python_or_shell() -> None:
    assert {language for language, _ in BLOCKS} <= {"python", "sh", "text"}


def test_every_public_name_is_told() -> None:
    missing = [name for name in pipes.__all__ if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", README)]
    assert missing == []


def test_a_command_is_one_line_that_sets_everything_up() -> None:
    commands = [line for language, code in BLOCKS if language == "sh" for line in code.splitlines()]
    assert [c.split(" && ")[-1] for c in commands] == [
        ".venv/bin/python examples/train_digits.py",
        ".venv/bin/python -m pytest",
    ]
    for command in commands:
        assert command.startswith("python -m venv .venv && .venv/bin/pip install -e '.[")


def test_links_and_the_module_map_point_at_files() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
    mapped = set(re.findall(r"^  (\w+(?:\.py|/)) ", README, flags=re.MULTILINE))
    real = {p.name for p in (ROOT / "pipes").glob("*.py")} | {f"{p.parent.name}/" for p in ROOT.glob("pipes/*/*.py")}
    assert real <= mapped, f"rooms that the README's map lacks: {sorted(real - mapped)}"
    assert mapped <= real, f"rooms that are only on the README's map: {sorted(mapped - real)}"
