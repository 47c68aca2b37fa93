"""Orders: pure functions of (length, key) that give a lazy sequence of indices with random access.

Laws: `shuffled` visits each index exactly once; the index at a position is computed without those before it; equal
(length, key) give equal indices on every platform and every version of NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipes import seeds
from pipes.errors import check_flag, check_size
from pipes.seeds import Key
from pipes.values import Value, show, value

type Indices = npt.NDArray[np.int64]
type At = Callable[[Indices], Indices]

EXACT_UP_TO = 1 << 17
ROUNDS = 6
BLOCK = 1 << 12


class Order(Value):
    """A way to visit a map-style source, for `sample`."""

    def length(self, n: int) -> int:
        """Return how many indices the order gives for a source of length `n`."""
        return n

    def bind(self, n: int, key: Key) -> At:
        """Return the function from positions (each below `length(n)`) to indices."""
        raise NotImplementedError(f"{type(self).__name__} must define bind(n, key)")


@value
class sequential(Order):
    """Visit 0, 1, 2, ...

    >>> sequential().bind(3, (0, 0))(np.arange(3)).tolist()
    [0, 1, 2]
    """

    def bind(self, n: int, key: Key) -> At:
        """See `Order.bind`."""
        return lambda positions: positions


@value
class shuffled(Order):
    """Visit each index once, in an order that depends on seed and epoch.

    >>> sorted(shuffled().bind(5, (1, 2))(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]

    Up to 2**17 elements every permutation is equally likely. Above, it is a keyed bijection (a Feistel network with
    cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): no memory and no start-up time
    however long the source is.
    """

    def bind(self, n: int, key: Key) -> At:
        """See `Order.bind`."""
        if n <= EXACT_UP_TO:
            return _late(lambda: seeds.permutation(key, 0, n))
        return _Blockwise(n, key)


class _Blockwise:
    """A Feistel bijection that computes an aligned block at once where it is read in sequence.

    A call has a fixed cost of some 60 us, and 4096 positions cost little more than one; a lone position is computed
    alone.
    """

    def __init__(self, n: int, key: Key) -> None:
        self._n, self._keys = n, seeds.random_words(key, 0, ROUNDS)
        self._last = -1
        self._cached: tuple[int, Indices] = (-1, np.empty(0, np.int64))  # one attribute, so that threads see a pair

    def __call__(self, positions: Indices) -> Indices:
        if not len(positions):
            return positions
        block = int(positions[0]) // BLOCK
        cached, values = self._cached
        if block != cached and block == self._last:
            end = min((block + 1) * BLOCK, self._n)
            cached, values = block, feistel(np.arange(block * BLOCK, end), self._n, self._keys)
            self._cached = cached, values
        self._last = block
        if block == cached:
            offsets = positions - block * BLOCK
            if (offsets.view(np.uint64) < len(values)).all():  # negative ones are huge
                return values[offsets]
        return feistel(positions, self._n, self._keys)


def feistel(positions: Indices, n: int, keys: npt.NDArray[np.uint64]) -> Indices:
    """Permute `range(n)` at `positions`, each of which must be below `n`: others might never leave the walk.

    The two halves may differ by one bit, so the domain is at most twice as large as `n` and the walk short.
    """
    bits = max(2, (n - 1).bit_length())
    low = np.uint64(bits // 2)
    masks = [np.uint64((1 << width) - 1) for width in (bits - bits // 2, bits // 2)]

    def encrypt(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> low, x & masks[1]
        for i, key in enumerate(keys):  # an even number of rounds, so that the widths are back in place
            scrambled = seeds.mix(right ^ key)
            scrambled &= masks[i % 2]
            scrambled ^= left
            left, right = right, scrambled
        return (left << low) | right

    x = encrypt(positions.astype(np.uint64))
    outside = np.flatnonzero(x >= n)
    while len(outside):
        again = encrypt(x[outside])
        x[outside] = again
        outside = outside[again >= n]
    return x.astype(np.int64)


@value
class with_replacement(Order):
    """Draw `size` indices, each independent and uniform.

    >>> bool((with_replacement(4).bind(1, (0, 0))(np.arange(4)) == 0).all())
    True
    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("size", self.size))

    def length(self, n: int) -> int:
        """See `Order.length`."""
        if n == 0:
            raise ValueError(f"{self!r} cannot draw from a source of length 0; check the source")
        return self.size

    def bind(self, n: int, key: Key) -> At:
        """See `Order.bind`."""
        return lambda positions: (_uniform(key, positions) * n).astype(np.int64)


def _uniform(key: Key, positions: Indices) -> npt.NDArray[np.float64]:
    """One number in [0, 1) of 53 bits for each position."""
    return (seeds.hashed(key, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@value
class weighted(Order):
    """Draw `size` indices with probability in proportion to `weights`.

    >>> weighted([0.0, 3.0, 0.0], 2).bind(3, (0, 0))(np.arange(2)).tolist()
    [1, 1]

    Exact in float64, for any number of weights; an index of weight 0 is never drawn. Without replacement each draw is
    in proportion to the weights that are left (Efraimidis and Spirakis, 2006). Holds one float64 or int64 a weight.
    """

    weights: Any
    size: int
    replacement: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size("size", self.size))
        check_flag("replacement", self.replacement)
        given = self.weights.tolist() if hasattr(self.weights, "tolist") else self.weights
        weights = np.array(given, np.float64)
        if weights.ndim != 1:
            raise ValueError(f"`weights` must be one-dimensional, got shape {weights.shape}; give one per sample")
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(bad):
            raise ValueError(f"`weights` must be finite and >= 0, got {weights[bad[0]]} at index {bad[0]}")
        positive = int(np.count_nonzero(weights))
        if not positive:
            raise ValueError(f"`weights` must not be all zero, got {len(weights)} zeros")
        if not self.replacement and positive < self.size:
            raise ValueError(
                f"`size` must be <= the number of non-zero weights without replacement, got {self.size} > {positive}"
            )
        weights.flags.writeable = False
        object.__setattr__(self, "weights", weights)

    def __repr__(self) -> str:
        replacement = "" if self.replacement else ", replacement=False"
        return f"weighted({_listed(self.weights)}, {self.size}{replacement})"

    @property
    def _scaled(self) -> npt.NDArray[np.float64]:
        """The weights, the largest about 1: sums neither overflow nor vanish."""
        up: npt.NDArray[np.float64] = self.weights * (2.0**1000 if self.weights.max() < 2.0**-900 else 1.0)
        return up / up.max()

    def length(self, n: int) -> int:
        """See `Order.length`."""
        if n != len(self.weights):
            raise ValueError(f"`weights` must have one weight per sample, got {len(self.weights)} for length {n}")
        return self.size

    def bind(self, n: int, key: Key) -> At:
        """See `Order.bind`."""
        if not self.replacement:
            return _late(lambda: self._without_replacement(n, key))
        sums = np.cumsum(self._scaled)
        last = int(np.flatnonzero(self.weights)[-1])

        def at(positions: Indices) -> Indices:
            found: Indices = np.searchsorted(sums, _uniform(key, positions) * sums[-1], side="right")
            return np.minimum(found, last)  # rounding may reach the sum itself

        return at

    def _without_replacement(self, n: int, key: Key) -> Indices:
        positive = np.flatnonzero(self.weights)
        u = 1.0 - _uniform(key, positive)  # in (0, 1]
        with np.errstate(over="ignore"):  # a wait too long to be told from another
            waits = -np.log(u) / self._scaled[positive]
        order: Indices = positive[np.argsort(waits, kind="stable")]
        return order[: self.size]


@value
class subset(Order):
    """Visit `indices`, in that order.

    >>> subset([2, 0]).bind(3, (0, 0))(np.arange(2)).tolist()
    [2, 0]
    """

    indices: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", index_array(self.indices, "indices"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_listed(self.indices)})"

    def length(self, n: int) -> int:
        """See `Order.length`."""
        check_range(self.indices, n)
        return len(self.indices)

    def bind(self, n: int, key: Key) -> At:
        """See `Order.bind`."""
        chosen: Indices = self.indices
        return lambda positions: chosen[positions]


@value
class shuffled_subset(subset):
    """Visit each of `indices` once, in an order that depends on seed and epoch.

    >>> sorted(shuffled_subset([2, 0]).bind(3, (0, 0))(np.arange(2)).tolist())
    [0, 2]
    """

    def bind(self, n: int, key: Key) -> At:
        """See `Order.bind`."""
        at = shuffled().bind(len(self.indices), key)
        chosen: Indices = self.indices
        return lambda positions: chosen[at(positions)]


def _listed(array: npt.NDArray[Any]) -> str:
    """A short array as the list that was given, a long one by its size."""
    return show(array.tolist() if len(array) <= LISTED else array)


LISTED = 20


def index_array(indices: Any, name: str) -> Indices:
    """Return integers as a read-only array."""
    if not hasattr(indices, "__iter__"):
        raise TypeError(f"`{name}` must be a sequence of integers, got {indices!r}; put it in a list")
    given = indices.tolist() if hasattr(indices, "tolist") else list(indices)
    array = np.array(given) if given else np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"`{name}` must be one-dimensional and of integers, got {array.dtype} of shape {array.shape}")
    array = array.astype(np.int64)
    array.flags.writeable = False
    return array


def check_range(indices: Indices, n: int | float) -> None:
    """Raise an error that names the first index outside a source of length `n`."""
    outside = np.flatnonzero((indices < 0) | (indices >= n))
    if len(outside):
        where = int(outside[0])
        raise IndexError(
            f"an index must be in 0..length-1, got index {int(indices[where])} at position {where} for length {n}; "
            "count negative indices from the start"
        )


def _late(compute: Callable[[], Indices]) -> At:
    """Look positions up in an array that is computed at the first look."""
    values: list[Indices] = []

    def at(positions: Indices) -> Indices:
        if not values:
            values.append(compute())
        return values[0][positions]

    return at
