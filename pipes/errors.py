"""Exception types, and checks that word a complaint as rule, value and advice.

Laws: a wrong argument is a `TypeError` or a `ValueError` raised at construction; an exception out of user code keeps
its type and gains a note that names stage and position; nothing is ever swallowed.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Sequence
from typing import Any


class StageError(RuntimeError):
    """Tell that user code broke the contract of the stage that called it.

    Raised for a `StopIteration` out of a function (which would silently shorten an epoch), for a bulk access that
    returns the wrong number of samples, and for the second run of a one-shot iterator.
    """


MOST = 1 << 62


def check_size(name: str, value: Any, *, least: int = 1, most: int = MOST, advice: str = "") -> int:
    """Return `value` as an int from `least` to `most`, NumPy integers included."""
    tail = f"; {advice}" if advice else ""
    if isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {value!r}{tail}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, got {value!r} of type {type(value).__name__}{tail}") from None
    if number < least:
        raise ValueError(f"`{name}` must be >= {least}, got {number}{tail}")
    if number > most:
        raise ValueError(f"`{name}` must be <= {most}, got {number}{tail}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """Return `value`, a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value`, one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(builtins.map(repr, choices))}, got {value!r}")
    return str(value)


def check_callable(name: str, value: Any) -> Callable[..., Any]:
    """Return `value`, a callable."""
    if not callable(value):
        raise TypeError(f"`{name}` must be callable, got {value!r} of type {type(value).__name__}")
    return value  # type: ignore[no-any-return]  # `callable` narrows Any to an unknown signature


def locate(error: BaseException, where: object, position: int, noun: str = "input position") -> None:
    """Note on `error` the stage and the position it came from."""
    error.add_note(f"pipes: in {where!r}, {noun} {position}")


def stopped(where: object, position: int, noun: str = "input position") -> StageError:
    """Word the error for a `StopIteration` that user code let escape."""
    return StageError(
        f"{where!r} raised StopIteration at {noun} {position}; it would end the epoch early without a word, "
        "so catch it in the function and return a value, or use `filter` to leave elements out"
    )


def call_each(fn: Callable[[Any], Any], xs: Sequence[Any], where: object, positions: Any) -> list[Any]:
    """Call `fn` on each of `xs` at the speed of the built-in `map`, blaming the right position when it raises.

    `list.extend` keeps what it got before an exception and takes a `StopIteration` for the end, so the length of the
    list tells in both cases which call went wrong; a Python loop with a counter costs twice as much.
    """
    out: list[Any] = []
    try:
        out.extend(builtins.map(fn, xs))
    except Exception as error:
        locate(error, where, int(positions[len(out)]))
        raise
    if len(out) != len(xs):
        raise stopped(where, int(positions[len(out)]))
    return out


class WorkerError(RuntimeError):
    """Tell that a worker failed and its work could not be done elsewhere.

    Raised when a task killed its worker more often than `restarts` allows, when a result or an exception could not be
    sent, and when a pipeline could not be serialised. `pid` and `status` are those of a process that ended by itself;
    a negative status is a signal.
    """

    pid: int | None = None
    status: int | None = None


class WorkerTimeoutError(WorkerError, TimeoutError):
    """Tell which worker did not answer in time, at what position, and where it stands."""
