"""What a saved state holds, and whether it belongs to a pipeline.

Laws: a state is small, JSON-able and versioned; it tells what the user received, never what was computed ahead; loading
it into another pipeline is an error that names the first part that differs. A fingerprint holds stage names, scalars,
qualified names of functions, and types and lengths of data: never an address, a hash or bytecode. Rank and world size
are no part of it where a batch behind `shard_by_rank` makes a share of a global batch: any rank's state serves all.
"""

from __future__ import annotations

import builtins
import functools
import json
import types
import zlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from pipes.batching import batch
from pipes.context import Cursor
from pipes.errors import check_size
from pipes.lines import from_lines
from pipes.pipeline import Pipeline
from pipes.sharding import shard_by_rank
from pipes.stage import Elementwise, Stage
from pipes.values import Value, same

VERSION = 1
SHOWN = 16
LONG = 64


class Position(NamedTuple):
    """Where a run stands: in which epoch, behind how many outputs, and at what cursor (None at its beginning)."""

    epoch: int
    cursor: Cursor = None
    outputs: int = 0


def saved(pipeline: Pipeline, position: Position) -> dict[str, Any]:
    """Return the state of a run; lists for tuples, as JSON has them."""
    try:
        cursor = json.loads(json.dumps(position.cursor))
    except TypeError as error:
        raise TypeError(f"the state of an iterator of {pipeline.source!r} cannot be saved as JSON: {error}") from error
    if not same(_listed(position.cursor), cursor):
        raise ValueError(
            f"the state of an iterator must survive JSON, got {position.cursor!r}, which comes back as {cursor!r}; "
            "let its state_dict() use str keys, lists and numbers"
        )
    state = {
        "version": VERSION,
        "seed": pipeline.seed,
        "epoch": position.epoch,
        "outputs": position.outputs,
        "cursor": cursor,
        "fingerprint": fingerprint(pipeline),
    }
    return {**state, "checksum": _checksum(state)}


def _checksum(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps({k: v for k, v in state.items() if k != "checksum"}, sort_keys=True).encode())


def _listed(x: Any) -> Any:
    """The same with lists for tuples."""
    if isinstance(x, (list, tuple)):
        return [_listed(y) for y in x]
    return {k: _listed(v) for k, v in x.items()} if isinstance(x, dict) else x


def loaded(pipeline: Pipeline, state: Any) -> tuple[int, Position]:
    """Return the seed and the position of a state, if it is this pipeline's."""
    keys = {"version", "seed", "epoch", "outputs", "cursor", "fingerprint", "checksum"}
    if not isinstance(state, dict) or not keys <= state.keys():
        missing = sorted(keys - state.keys()) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"a state must be what state_dict() returned, got one that is corrupt or cut short: {missing}")
    if state["version"] != VERSION:
        raise ValueError(
            f"a state must be of version {VERSION}, got {state['version']!r}; load it with the pipes it is of"
        )
    if state["checksum"] != _checksum(state):
        raise ValueError("a state must be what state_dict() returned, got one whose checksum differs: it is corrupt")
    _check_fingerprint(fingerprint(pipeline), state["fingerprint"])
    outputs = check_size("outputs", state["outputs"], least=0)
    return state["seed"], Position(check_size("epoch", state["epoch"], least=0), state["cursor"], outputs)


def _check_fingerprint(ours: list[str], theirs: Sequence[Any]) -> None:
    for i in range(max(len(ours), len(theirs))):
        mine = ours[i] if i < len(ours) else "nothing"
        other = theirs[i] if i < len(theirs) else "nothing"
        if mine != other:
            what = f"stage {i}" if i else "the source"
            raise ValueError(
                f"a state must be loaded into the pipeline it was saved from; {what} is {mine} here and {other} there"
            )


def fingerprint(pipeline: Pipeline) -> list[str]:
    """Describe the source and each stage."""
    ranked: shard_by_rank | None = None
    parts = [_described(pipeline.source)]
    for i, stage in enumerate(pipeline.stages):
        if isinstance(stage, shard_by_rank):
            elastic = _is_batched(pipeline.stages[i + 1 :])
            ranked = stage if elastic else None
            world = "" if elastic else f"world_size={stage.world_size}, "
            parts.append(f"shard_by_rank({world}uneven={stage.uneven!r})")
        elif isinstance(stage, batch) and ranked is not None:
            size = stage.size * (ranked.world_size or 1)
            parts.append(f"batch(size={size} on all ranks, drop_last={stage.drop_last})")
            ranked = None
        else:
            parts.append(_described(stage))
    return parts


def _is_batched(behind: Sequence[Stage]) -> bool:
    """Whether only one-to-one stages come before a batch, which then is a share of a global batch."""
    for stage in behind:
        if isinstance(stage, batch):
            return True
        if not (isinstance(stage, Elementwise) and stage.exact):
            return False
    return False


def _described(x: Any) -> str:
    if isinstance(x, Pipeline):
        return f"[{', '.join(fingerprint(x))}]"
    if isinstance(x, from_lines):  # by their number: a folder may have moved
        return f"from_lines({len(x.paths)} files, encoding={x.encoding!r}, newline={x.newline!r})"
    if isinstance(x, Value):
        named: list[str] = [f.name for f in fields(x)] if is_dataclass(x) else []
        return f"{type(x).__name__}({', '.join(f'{n}={_described(getattr(x, n))}' for n in named)})"
    if isinstance(x, functools.partial):
        return f"partial({_described(x.func)}, {_described(x.args)}, {_described(tuple(sorted(x.keywords.items())))})"
    if isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return f"{x.__module__}.{x.__qualname__}"
    if isinstance(x, str) and len(x) > LONG:
        return f"str[{len(x)}]"
    if isinstance(x, (int, float, str, type(None))):
        return repr(x)
    if isinstance(x, tuple) and len(x) <= SHOWN:
        return f"({', '.join(builtins.map(_described, x))})"
    return type(x).__name__ + (f"[{len(x)}]" if hasattr(x, "__len__") else "")
