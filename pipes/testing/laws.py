"""The laws, as functions that raise `LawError` with the law's name and what broke it."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np

from pipes.context import Context
from pipes.isolation import Kept
from pipes.pipeline import Pipeline, pipe
from pipes.sources import from_iterable, from_map
from pipes.stage import Stage, as_stage
from pipes.values import same, show


class LawError(AssertionError):
    """Tell which law was broken, by what, and how."""


def _hold(law: str, condition: bool, detail: str) -> None:
    if not condition:
        raise LawError(f"{law}: {detail}")


def check_pipeline(pipeline: Pipeline, *, limit: int = 100) -> None:
    """Check the laws of a pipeline on its first `limit` outputs.

    >>> from pipes import map
    >>> check_pipeline(pipe(range(5), map(str)))

    Purity (two runs are equal, also after an abandoned one and after pickling; the caller's global generators are left
    alone), position (`len`, `[i]`, slices), and resume (cut anywhere, go on from the cursor after a trip through JSON).
    Raises `LawError`. The source must be one that can be run more than once.
    """
    full = list(itertools.islice(pipeline, limit))
    _check_purity(pipeline, full, limit)
    _check_position(pipeline, full, limit)
    _check_resume(pipeline, full, limit)


def _check_purity(pipeline: Pipeline, full: list[Any], limit: int) -> None:
    before = _generator_states()
    list(itertools.islice(pipeline, limit // 2))
    again = list(itertools.islice(pipeline, limit))
    _hold("purity", same(full, again), f"two runs of {pipeline!r} differ: {show(full)} and {show(again)}")
    _hold("purity", same(before, _generator_states()), f"{pipeline!r} changed the caller's global generators")
    pickled = list(itertools.islice(cloudpickle.loads(cloudpickle.dumps(pipeline)), limit))
    comparable = same(full, cloudpickle.loads(cloudpickle.dumps(full)))  # not where elements equal only themselves
    _hold(
        "purity",
        same(full, pickled) or not comparable,
        f"{pipeline!r} differs after pickling: {show(full)} and {show(pickled)}",
    )
    _hold("purity", " at 0x" not in repr(pipeline), f"the repr {pipeline!r} holds a memory address")


def _generator_states() -> list[Any]:
    return [random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002  # the global generator itself


def _check_position(pipeline: Pipeline, full: list[Any], limit: int) -> None:
    n = pipeline.length
    if n is None:
        return
    _hold("position", min(n, limit) == len(full), f"{pipeline!r} has length {n} and gave {len(full)} outputs")
    try:
        alone = [pipeline[i] for i in range(len(full))]
        pipeline[:0]
    except TypeError:  # a stream of known length
        return
    _hold("position", same(full, alone), f"{pipeline!r} gave {show(full)} in a run and {show(alone)} by position")
    half = len(full) // 2
    parts = [*pipeline[:half], *itertools.islice(pipeline[half:], limit - half)]
    _hold("position", same(full, parts), f"the slices of {pipeline!r} give {show(parts)}, not {show(full)}")


def _check_resume(pipeline: Pipeline, full: list[Any], limit: int) -> None:
    context = Context(pipeline.seed, pipeline.epoch, globals=Kept())
    cursors = [cursor for _, cursor in itertools.islice(pipeline.run(context), limit)]
    for cut, cursor in enumerate(cursors, 1):
        saved = json.loads(json.dumps(cursor))
        rest = [y for y, _ in itertools.islice(pipeline.run(context, saved), limit - cut)]
        _hold("resume", same(rest, full[cut:]), f"{pipeline!r} cut after {cut}: {show(rest)}, not {show(full[cut:])}")


def check_stage(stage: Any, items: Iterable[Any], *, ahead: int = 0) -> None:
    """Check the laws of a stage on `items`, which should differ from each other, alone and in pipelines.

    >>> from pipes import shuffle_buffer
    >>> check_stage(shuffle_buffer(3), range(8), ahead=3)
    >>> check_stage(lambda xs: iter(list(xs)), [1, 2])
    Traceback (most recent call last):
    pipes.testing.laws.LawError: laziness: ...

    Beyond `check_pipeline`, with random access and as a stream: laziness (a call pulls nothing; the outputs so far have
    pulled no more than they need, plus `ahead`), errors (a fault of the source arrives as it is, after all outputs that
    do not need what follows it), purity of the input, and `None` as an ordinary element. Raises `LawError`.
    """
    made, elements = as_stage(stage), list(items)
    once, again = list(_run(made, elements)), list(_run(made, elements))
    _hold("purity", same(once, again), f"two runs of {made!r} differ: {show(once)} and {show(again)}")
    _check_laziness(made, elements, ahead)
    _check_input_is_kept(made, elements)
    _check_errors(made, elements, ahead)
    _check_none(made, len(elements))
    streamed, positioned = pipe(from_iterable(elements), made), pipe(from_map(elements), made)
    check_pipeline(streamed)
    check_pipeline(positioned)
    if _draws_nothing(made, elements):
        ways = [list(streamed), list(positioned), list(made(elements))]
        _hold(
            "purity", same(ways[0], ways[2]), f"{made!r} gives {show(ways[2])} alone and {show(ways[0])} in a pipeline"
        )
        _hold("position", same(ways[0], ways[1]), f"{made!r}: stream {show(ways[0])}, random access {show(ways[1])}")


def _draws_nothing(stage: Stage, items: Sequence[Any]) -> bool:
    return same(list(stage(items)), list(stage(items)))


class _Counted:
    """An iterable that counts what is pulled from it, and may fail at some point."""

    def __init__(self, items: Sequence[Any], *, fail_at: int | None = None) -> None:
        self.items, self.fail_at, self.pulled = items, fail_at, 0

    def __iter__(self) -> Iterator[Any]:
        for i, x in enumerate(self.items):
            if i == self.fail_at:
                raise _FaultError(i)
            self.pulled += 1
            yield x


class _FaultError(Exception):
    """The source's own exception."""


def _run(stage: Stage, iterable: Iterable[Any]) -> Iterator[Any]:
    """Run over a source that can be iterated again, through the drivers of pipelines, so that draws are seeded."""
    return iter(pipe(from_iterable(iterable), stage))


def _needed(stage: Stage, items: Sequence[Any]) -> list[int]:
    """For each output, the smallest number of inputs that gives it and all before it."""
    if stage.replays:  # a prefix of the input gives other outputs from the second pass on
        return []
    full, needed = list(_run(stage, items)), []
    size = 0
    for count in range(1, len(full) + 1):
        while size < len(items) and not same(list(_run(stage, items[:size]))[:count], full[:count]):
            size += 1
        needed.append(size)
    return needed


def _check_laziness(stage: Stage, items: Sequence[Any], ahead: int) -> None:
    source = _Counted(items)
    outputs = stage(source)
    _hold("laziness", source.pulled == 0, f"calling {stage!r} pulled {source.pulled} elements")
    _hold("laziness", iter(outputs) is outputs, f"{stage!r} must return an iterator, got {show(outputs)}")
    source = _Counted(items)
    running = _run(stage, source)
    for count, bound in enumerate(_needed(stage, items), 1):
        next(running)
        _hold(
            "laziness",
            source.pulled <= bound + ahead,
            f"{stage!r} pulled {source.pulled} elements for {count} outputs, which need {bound} (+ {ahead} ahead)",
        )


def _check_input_is_kept(stage: Stage, items: Sequence[Any]) -> None:
    try:
        before = copy.deepcopy(items)
    except Exception:  # noqa: BLE001  # what cannot be copied cannot be compared with its copy
        return
    if same(before, items):
        list(_run(stage, items))
        _hold("purity", same(before, items), f"{stage!r} changed its input from {show(before)} to {show(items)}")


def _check_errors(stage: Stage, items: Sequence[Any], ahead: int) -> None:
    full, needed = list(_run(stage, items)), _needed(stage, items)
    for fail_at in range(len(items)):
        got: list[Any] = []
        try:
            got.extend(_run(stage, _Counted(items, fail_at=fail_at)))  # keeps what came before an exception
        except _FaultError:
            due = sum(size + ahead <= fail_at for size in needed)
            fine = len(got) >= due and same(got, full[: len(got)])
            _hold("errors", fine, f"{stage!r} gave {show(got)} before the fault, not {show(full[:due])}")
        except Exception as error:
            raise LawError(f"errors: {stage!r} turned the source's exception into {error!r}") from error
        else:
            _hold("errors", same(got, full), f"{stage!r} swallowed an exception of its source at element {fail_at}")


class _Thing:
    """An element like any other."""


def _check_none(stage: Stage, size: int) -> None:
    try:
        things = len(list(_run(stage, [_Thing() for _ in range(size)])))
        nones = len(list(_run(stage, [None] * size)))
    except Exception:  # noqa: BLE001  # a function that wants other elements than these
        return
    if isinstance(stage, Stage) and not stage.draws:
        _hold(
            "none is an element",
            things == nones,
            f"{stage!r} gave {nones} outputs of {size} Nones, {things} of objects",
        )
