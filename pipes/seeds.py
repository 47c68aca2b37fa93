"""Derive every key and generator from (seed, epoch, path, stage, shard, index) by hashing.

Laws: pure functions; no two different lists of parts share a key (up to collisions of a 128-bit hash); never an
addition, so that seed 1 in epoch 0 has nothing in common with seed 0 in epoch 1.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

type Key = tuple[int, int]

MASK = (1 << 64) - 1


def derive(*parts: object) -> Key:
    """Hash scalars, strings and tuples of them to 128 bits.

    >>> derive(0, 1) == derive(1, 0)
    False
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def words(size: int, *numbers: int) -> bytes:
    """Hash 64-bit numbers to `size` bytes: the fast path, once per element or unit."""
    packed = struct.pack(f"<{len(numbers)}Q", *[n & MASK for n in numbers])
    return hashlib.blake2b(packed, digest_size=size).digest()


class _Hashed(np.random.bit_generator.ISeedSequence):
    """A seed sequence that is hashed already: a PCG64 from it costs 1 us, `default_rng(seed)` 11 us."""

    def __init__(self, state: npt.NDArray[np.uint64]) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> npt.NDArray[np.uint64]:
        return self._state


def generator(*numbers: int) -> np.random.Generator:
    """Return a fresh `numpy.random.Generator` (PCG64) that depends on `numbers` alone.

    >>> bool(generator(1, 2).random() == generator(1, 2).random())
    True
    """
    state: Any = _Hashed(np.frombuffer(words(32, *numbers), np.uint64))  # a type that NumPy's stubs leave out
    return np.random.Generator(np.random.PCG64(state))


def random_words(key: Key, index: int, size: int) -> npt.NDArray[np.uint64]:
    """Return `size` raw 64-bit words.

    Raw words of Philox, since NEP 19 lets `Generator.permutation` and `integers` change between NumPy versions.
    """
    counter = np.array([0, 0, index & MASK, index >> 64], np.uint64)
    return np.random.Philox(key=np.array(key, np.uint64), counter=counter).random_raw(size)


def permutation(key: Key, index: int, size: int) -> npt.NDArray[np.int64]:
    """Return a permutation of `range(size)`, each equally likely.

    Random words, each with its position in its low bits, are sorted: no two are equal, so every sorting algorithm gives
    the same on every platform, and sorting values is many times faster than a stable `argsort`.
    """
    low = np.uint64(size.bit_length())
    words = random_words(key, index, size) >> low << low
    words |= np.arange(size, dtype=np.uint64)
    words.sort()
    return (words & np.uint64((1 << int(low)) - 1)).astype(np.int64)


_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble each 64-bit word: the finaliser of splitmix64 (Steele, Lea and Flood, 2014), vectorised."""
    x = x + _GOLDEN  # the only copy: the rest is in place
    x ^= x >> _S30
    x *= _MIX1
    x ^= x >> _S27
    x *= _MIX2
    x ^= x >> _S31
    return x


def hashed(key: Key, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return one well-mixed word per position, at random access."""
    return mix(mix(positions.astype(np.uint64) ^ np.uint64(key[0])) ^ np.uint64(key[1]))
