"""What holds for the code as a whole: the borders between rooms, what an import does, sizes, and documentation."""

import ast
import doctest
import inspect
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import pipes
from pipes import Order, Source, Stage

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipes"
ROOMS = [str(p.relative_to(PACKAGE).with_suffix("")) for p in sorted(PACKAGE.rglob("*.py"))]
STAGES = [
    "batching",
    "collating",
    "elements",
    "lines",
    "ordering",
    "orders",
    "pinning",
    "sampling",
    "sharding",
    "sources",
]

# From low to high; a room may import only rooms on lower lines. Rooms of one line do not know each other.
LEVELS = [
    ["errors", "info", "packed", "structures"],
    ["values"],
    ["seeds"],
    ["isolation"],
    ["context"],
    ["columns"],
    ["nodes"],
    ["combining"],
    ["heads"],
    ["stage"],
    STAGES,
    ["pipeline"],
    ["joining"],
    ["execution"],
    ["drop_in"],
    ["dataloader"],
    ["__init__"],
    ["testing"],  # uses the package as its users do
]
FOLDERS = ("drop_in", "execution", "testing")  # whose rooms may know each other
EXCEPTIONS = {("sampling", "orders")}  # `sample` is the stage that takes an order
LATE = {  # imported inside a function
    ("nodes", "heads"),  # a node runs as a head, and heads are made of nodes
    ("pipeline", "drop_in/as_torch"),  # which is made of pipelines, and needs torch
    ("execution/loader", "drop_in/as_torch"),
    ("__init__", "dataloader"),  # needs torch
}

CONTRACTS = {
    "Block",
    "Context",
    "DataLoader",
    "Elementwise",
    "Order",
    "Pipeline",
    "Source",
    "Stage",
    "StageError",
    "Loader",
    "WorkerError",
    "WorkerInfo",
    "WorkerTimeoutError",
}
PUBLIC = sorted([*pipes.__all__, "DataLoader"])  # which needs torch, so that `import *` leaves it out
CALLED = sorted(set(PUBLIC) - CONTRACTS)

type Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree(room: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{room}.py").read_text(encoding="utf-8"))


def level(room: str) -> int:
    top = room.partition("/")[0]
    return next((i for i, rooms in enumerate(LEVELS) if top in rooms), -1)


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Each module that `node` imports; `from pipes import x` counts as `pipes.x` where that is a room."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        module = node.module or ""
        for alias in node.names:
            is_room = module == "pipes" and alias.name in ROOMS
            yield f"pipes.{alias.name}" if is_room else module


def imports(room: str) -> set[tuple[str, bool]]:
    """(module, is it imported inside a function) for every import of a room."""
    parsed = tree(room)
    inside = {id(n) for f in functions(parsed) for n in ast.walk(f)}
    return {(m, id(n) in inside) for n in ast.walk(parsed) for m in imported_modules(n)}


def functions(parsed: ast.Module) -> list[Function]:
    return [n for n in ast.walk(parsed) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def rooms_used(room: str) -> set[tuple[str, bool]]:
    ours = [(module.split("."), late) for module, late in imports(room)]
    return {("/".join(parts[1:]) or "__init__", late) for parts, late in ours if parts[0] == "pipes"}


# -- borders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_downwards(room: str) -> None:
    assert level(room) >= 0, f"{room} has no place in LEVELS; give it one, and a line in the README's map"
    for used, late in rooms_used(room):
        below = level(used) < level(room) or room.partition("/")[0] == used.partition("/")[0] in FOLDERS
        allowed = below or (room, used) in EXCEPTIONS or (late and (room, used) in LATE)
        assert allowed, f"{room} imports {used}"


@pytest.mark.parametrize(("room", "used"), LATE)
def test_what_is_imported_late_is_imported_inside_functions_only(room: str, used: str) -> None:
    assert True in [late for name, late in rooms_used(room) if name == used]
    if room != "__init__":  # which also imports it for type checkers
        assert [late for name, late in rooms_used(room) if name == used] == [True]


@pytest.mark.parametrize("room", ROOMS)
def test_torch_is_known_to_few_rooms_and_inside_functions(room: str) -> None:
    if room == "dataloader" or room.startswith("drop_in/"):  # which nothing imports but late
        return
    torch = [late for module, late in imports(room) if module.split(".")[0] == "torch"]
    assert all(torch)
    assert not torch or room in {"columns", "collating", "pinning"} or room.startswith(("execution/", "testing"))


@pytest.mark.parametrize("room", ROOMS)
def test_only_execution_knows_processes_threads_and_queues(room: str) -> None:
    banned = {"concurrent", "multiprocessing", "queue", "select", "signal", "socket", "subprocess", "threading"}
    if not room.startswith("execution/") and room != "drop_in/processes":  # torch's words for execution's processes
        assert {m.split(".")[0] for m, _ in imports(room)} & banned == set()


@pytest.mark.parametrize("room", [room for room in ROOMS if level(room) < level("execution")])
def test_nothing_but_its_arguments_reaches_a_stage(room: str) -> None:
    modules = {m.split(".")[0] for m, _ in imports(room)}
    assert modules & {"time", "datetime", "uuid", "secrets", "socket"} == set()
    assert room == "sharding" or "os" not in modules
    names = {n.attr for n in ast.walk(tree(room)) if isinstance(n, ast.Attribute)}
    assert names & {"getpid", "urandom", "getenv"} == set()
    assert not any(isinstance(n, ast.Global) for n in ast.walk(tree(room)))


# -- importing ---------------------------------------------------------------------------------------------------------

IMPORT = """
import json, logging, random, sys, threading, warnings
handlers = list(logging.getLogger().handlers)
loggers, state = set(logging.root.manager.loggerDict), random.getstate()
import numpy
state_of_numpy = numpy.random.get_state(legacy=False)["state"]["key"].tolist()
filters = list(warnings.filters)
import pipes
print(json.dumps({
    "torch": sorted({m.split(".")[0] for m in sys.modules} & {"torch", "sklearn", "hypothesis", "multiprocessing"}),
    "threads": threading.active_count(),
    "filters": warnings.filters == filters,
    "handlers": logging.getLogger().handlers == handlers,
    "loggers": [name for name in set(logging.root.manager.loggerDict) - loggers if name.startswith("pipes")],
    "random": random.getstate() == state,
    "numpy": numpy.random.get_state(legacy=False)["state"]["key"].tolist() == state_of_numpy,
    "children": open(f"/proc/self/task/{threading.get_native_id()}/children").read(),
}))
"""


def test_importing_the_package_does_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        '{"torch": [], "threads": 1, "filters": true, "handlers": true, "loggers": [], "random": true, "numpy": true, '
        '"children": ""}'
    )


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", ROOMS)
def test_a_module_has_at_most_400_lines_and_a_docstring(room: str) -> None:
    text = (PACKAGE / f"{room}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(tree(room))


@pytest.mark.parametrize("room", ROOMS)
def test_the_body_of_a_function_has_at_most_40_lines(room: str) -> None:
    for function in functions(tree(room)):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        if body:
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
            assert lines <= 40, f"{room}.{function.name} has {lines} lines"


# -- names and documentation -------------------------------------------------------------------------------------------


def test_the_public_names_are_sorted_and_complete() -> None:
    assert all(a < b for a, b in pairwise(pipes.__all__))
    assert all(hasattr(pipes, name) for name in pipes.__all__)
    named = {n for n, v in vars(pipes).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert named <= set(pipes.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_what_it_is_in_one_line(name: str) -> None:
    first, _, rest = (inspect.getdoc(getattr(pipes, name)) or "").partition("\n")
    assert first.endswith(".")
    assert len(first) <= 120
    assert not rest or rest.startswith("\n")


@pytest.mark.parametrize("name", CALLED)
def test_what_is_called_says_what_it_does_in_the_imperative(name: str) -> None:
    verb = (inspect.getdoc(getattr(pipes, name)) or "").split()[0]
    assert verb[0].isupper()
    assert not verb.endswith(("s", "ing", "ed"))


@pytest.mark.parametrize("name", CALLED)
def test_what_is_called_is_shown_by_a_doctest(name: str) -> None:
    assert doctest.DocTestParser().get_examples(inspect.getdoc(getattr(pipes, name)) or "")


@pytest.mark.parametrize("name", CALLED)
def test_a_stage_says_what_it_holds(name: str) -> None:
    cls = getattr(pipes, name)
    if inspect.isclass(cls) and issubclass(cls, Stage):
        assert "Holds" in (cls.__doc__ or "") or "holds" in (cls.__doc__ or "")


def test_a_public_class_is_a_stage_a_source_an_order_or_a_contract() -> None:
    classes = {name for name in CALLED if inspect.isclass(getattr(pipes, name))}
    assert {name for name in classes if not issubclass(getattr(pipes, name), (Stage, Source, Order))} == set()


# -- the project -------------------------------------------------------------------------------------------------------


def test_ci_runs_what_the_readme_says() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for part in ("python -m venv .venv", ".venv/bin/pip install -e '.[dev]'", ".venv/bin/python -m pytest"):
        assert part in ci
        assert part in (ROOT / "README.md").read_text(encoding="utf-8")
