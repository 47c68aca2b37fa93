"""Seed the process's global generators for user code, and keep the caller's own states out of it.

Code that draws from `random`, `numpy.random` or torch's default generator is made reproducible by seeding all three
before each unit. Laws: the draws of a unit depend on its key alone; after each delivered output the caller's three
states are what they were, cached Gaussians included; nothing is saved or seeded where no user code runs.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pipes.seeds import words


class Unseeded:
    """Leave the global generators alone: for a stage that is called outside a pipeline."""

    def seed(self, *numbers: int) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Do nothing."""

    def set_aside(self) -> Any:
        """Begin anew inside what is under way, and return that."""

    def take_up(self, aside: Any) -> None:
        """Go on with what was set aside."""


class Seeded(Unseeded):
    """Seed and never restore: for a process that has no caller, a worker."""

    def seed(self, *numbers: int) -> None:
        """Give `random`, NumPy and torch a seed each, derived from `numbers`."""
        seed_global_generators(*numbers)


class Kept(Seeded):
    """Save the caller's states at the first seeding after a `restore`, so that an output without user code is free."""

    def __init__(self) -> None:
        self._own: np.random.MT19937 | None = None
        self._put_back: list[Callable[[], None]] = []

    def seed(self, *numbers: int) -> None:
        """Save the caller's states once, then seed."""
        if not self._put_back:
            self._own = self._own or np.random.MT19937(0)
            self._put_back = [_keep_random(), _keep_numpy(self._own), _keep_torch()]
        seed_global_generators(*numbers)

    def restore(self) -> None:
        """Put the caller's states back, if they were saved."""
        put_back, self._put_back = self._put_back, []
        for put in put_back:
            put()

    def set_aside(self) -> Any:
        """See `Unseeded.set_aside`."""
        aside = self._own, self._put_back
        self._own, self._put_back = None, []
        return aside

    def take_up(self, aside: Any) -> None:
        """See `Unseeded.take_up`."""
        self._own, self._put_back = aside


@contextmanager
def isolated(*numbers: int) -> Iterator[None]:
    """Seed the global generators for a `with` block and put the caller's states back after it."""
    kept = Kept()
    kept.seed(*numbers)
    try:
        yield
    finally:
        kept.restore()


def seed_global_generators(*numbers: int) -> None:
    """Seed `random` with 64 bits and, since that is all they take quickly, NumPy and torch with 32 and 64."""
    for_random, for_torch, for_numpy = struct.unpack("<QQI", words(20, *numbers))
    random.seed(for_random)
    np.random.seed(for_numpy)  # noqa: NPY002  # the legacy global generator is the very thing to seed
    if (generator := _torch_generator()) is not None:
        generator.manual_seed(for_torch)


def _torch_generator() -> Any:
    """Torch's default generator if the program has imported torch; not `torch.manual_seed`, which costs 300 us."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _keep_random() -> Callable[[], None]:
    """Copy the Mersenne state where it lies: `getstate` makes a tuple of 625 ints, which costs ten times as much."""
    if _RANDOM_AT is None:
        state = random.getstate()
        return lambda: random.setstate(state)
    instance: Any = random.random.__self__  # type: ignore[attr-defined]  # a bound method, typed as a function
    words, gaussian = ctypes.string_at(_RANDOM_AT, MERSENNE_BYTES), instance.gauss_next

    def put_back() -> None:
        ctypes.memmove(_RANDOM_AT, words, MERSENNE_BYTES)
        instance.gauss_next = gaussian

    return put_back


MERSENNE_BYTES = 4 * 625


def _random_state_address() -> int | None:
    """Find where the global `random` keeps its 624 words and position: right behind the object's head, or None."""
    instance: Any = getattr(random.random, "__self__", None)
    if type(instance) is not random.Random or sys.implementation.name != "cpython":
        return None
    address = id(instance) + object.__basicsize__
    position, *words = struct.unpack("=625I", ctypes.string_at(address, MERSENNE_BYTES))
    _, expected, _ = random.getstate()
    return address if (*words, position) == expected else None


_RANDOM_AT = _random_state_address()


def _keep_torch() -> Callable[[], None]:
    if (generator := _torch_generator()) is None:
        return lambda: None
    state = generator.get_state()
    return lambda: generator.set_state(state)


def _keep_numpy(own: np.random.MT19937) -> Callable[[], None]:
    """Swap our own bit generator in: 0.1 us, where `get_state` and `set_state` cost 95 us together.

    The swap forgets the caller's cached Gaussian, which no cheap call shows: draw one, and if the generator's position
    did not move, that was the cached one.
    """
    theirs = np.random.get_bit_generator()
    if not isinstance(theirs, np.random.MT19937):
        state = np.random.get_state(legacy=False)  # noqa: NPY002  # the global generator itself
        np.random.set_bit_generator(own)
        return lambda: _swap_back(theirs, state)
    address = theirs.ctypes.state_address  # of 624 words and the position, by NumPy's documented interface
    before = ctypes.string_at(address, MERSENNE_BYTES)
    drawn = float(np.random.standard_normal())  # noqa: NPY002  # the global generator itself
    cached = ctypes.string_at(address + MERSENNE_BYTES - 4, 4) == before[-4:]
    if not cached:
        ctypes.memmove(address, before, MERSENNE_BYTES)
    np.random.set_bit_generator(own)
    return lambda: _restore_numpy(theirs, drawn if cached else None)


def _swap_back(theirs: Any, state: Any) -> None:
    np.random.set_bit_generator(theirs)
    np.random.set_state(state)  # noqa: NPY002  # the global generator itself


def _restore_numpy(theirs: Any, cached_gaussian: float | None) -> None:
    np.random.set_bit_generator(theirs)
    if cached_gaussian is not None:
        state: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # the global generator itself
        state["has_gauss"], state["gauss"] = 1, cached_gaussian
        np.random.set_state(state)  # noqa: NPY002  # the global generator itself
