"""Hypothesis strategies for stages and pipelines.

Everything they use is importable, so that what they make survives pickling and equals itself afterwards. Hypothesis is
imported when a strategy is made: it is no dependency of the package.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import pipes as p

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def _number(x: Any) -> int:
    """A number that depends on the printed value alone, in every process."""
    return int.from_bytes(hashlib.blake2b(repr(x).encode(), digest_size=4).digest(), "little")


def tagged(x: Any) -> Any:
    """Change an element, keeping what it was."""
    return ("t", x)


def jittered(x: Any, rng: np.random.Generator) -> Any:
    """Draw from the element's own generator."""
    return (x, int(rng.integers(10**6)))


def noisy(x: Any) -> Any:
    """Draw from the global generators, cached Gaussians included."""
    numpy_draws = (int(np.random.randint(10**6)), float(np.random.standard_normal()))  # noqa: NPY002  # the global generator itself
    return (x, random.randrange(10**6), random.gauss(0, 1), *numpy_draws)


def most(x: Any) -> bool:
    """Be true for two elements of three."""
    return _number(x) % 3 != 0


def often(_: Any) -> bool:
    """Be true or not by a draw from a global generator."""
    return random.random() < 0.7


def doubled(x: Any) -> list[Any]:
    """Return none or two outputs."""
    return [x, ("d", x)] if _number(x) % 2 else []


def scattered(x: Any) -> Iterator[Any]:
    """Give some outputs, drawing while they are given."""
    return ((x, random.random()) for _ in range(random.randrange(3)))


def chained(elements: Iterable[Any], rng: np.random.Generator) -> Iterator[Any]:
    """Pair some elements with the one before: an opaque callable with state and draws."""
    previous: Any = None
    for k, x in enumerate(elements):
        if k and rng.random() < 0.8:
            yield previous, x
        previous = x


class Numbers:
    """A data set whose access draws from a global generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.size:
            raise IndexError(i)
        return (i, random.randrange(10**6))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size})"


class BulkNumbers(Numbers):
    """The same with bulk access."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return many samples."""
        return [self[i] for i in indices]


class Counting:
    """A factory of a stream, with a generator of the run's own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, rng: np.random.Generator) -> Iterator[Any]:
        """Make the stream."""
        return ((i, int(rng.integers(100))) for i in range(self.size))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.size)

    def __repr__(self) -> str:
        return f"Counting({self.size})"


def stages() -> SearchStrategy[p.Stage]:
    """Draw stages that can follow anything: elementwise ones with and without draws, and block stages."""
    from hypothesis import strategies as st

    size = st.integers(1, 5)
    elementwise = st.sampled_from(
        [
            p.map(tagged),
            p.map(jittered),
            p.map(noisy),
            p.filter(most),
            p.filter(often),
            p.flat_map(doubled),
            p.flat_map(scattered),
        ]
    )
    blocks = st.one_of(
        size.map(p.batch),
        size.map(lambda n: p.batch(n, drop_last=True)),
        st.integers(0, 12).map(p.take),
        st.integers(0, 6).map(p.skip),
        size.map(p.shuffle_buffer),
        st.integers(1, 3).map(p.repeat),
        st.builds(p.enumerate, st.integers(-1, 3)),
        st.builds(_rank, st.integers(1, 3), st.integers(0, 2), st.sampled_from(["keep", "drop", "pad"])),
    )
    return st.one_of(elementwise, blocks)


def _rank(world_size: int, rank: int, uneven: str) -> p.shard_by_rank:
    return p.shard_by_rank(rank % world_size, world_size, uneven=uneven)


def _orders() -> SearchStrategy[Any]:
    from hypothesis import strategies as st

    return st.sampled_from([p.shuffled(), p.sequential(), _reversed, _drawn])


def _reversed(n: int) -> range:
    return range(n - 1, -1, -1)


def _drawn(n: int, rng: np.random.Generator) -> Any:
    return rng.permutation(n)


def sources(*, size: int = 14) -> SearchStrategy[Any]:
    """Draw sources of up to `size` elements: with random access, bulk access, columns, and streams."""
    from hypothesis import strategies as st

    return st.integers(0, size).flatmap(
        lambda n: st.sampled_from(
            [
                p.from_map(range(n)),
                p.from_map(Numbers(n)),
                p.from_map(BulkNumbers(n)),
                p.from_map([None] * n),
                p.from_map(np.arange(n)),
                p.from_arrays(np.arange(n), np.arange(n) * 0.5),
                p.from_iterable(Counting(n)),
                p.from_iterable(range(n)),
            ]
        )
    )


def pipelines(*, size: int = 14, stages_at_most: int = 5, shards: bool = True) -> SearchStrategy[p.Pipeline]:
    """Draw pipelines of up to `stages_at_most` stages over up to `size` elements, joins, orders and shards included."""
    from hypothesis import strategies as st

    simple = st.builds(lambda source, added: p.pipe(source, *added), sources(size=5), st.lists(stages(), max_size=2))
    starts = st.one_of(
        sources(size=size),
        sources(size=size),
        st.lists(simple, max_size=3).map(lambda parts: p.concat(*parts)),
        st.lists(simple, max_size=3).map(lambda parts: p.zip(*parts, strict=False)),
    )

    @st.composite
    def composed(draw: Any) -> p.Pipeline:
        pipeline = p.pipe(draw(starts))
        for _ in range(draw(st.integers(0, stages_at_most))):
            pipeline = p.pipe(pipeline, draw(_next_stage(pipeline)))
        if shards and draw(st.booleans()):
            pipeline = _with_shards(pipeline, draw(st.integers(0, stages_at_most)), draw(st.integers(1, 4)))
        if draw(st.integers(0, 2)) == 0:
            pipeline = p.pipe(pipeline, _seam(), *draw(st.lists(stages(), max_size=2)))
        return pipeline.seeded(draw(st.integers(0, 3))).at_epoch(draw(st.integers(0, 3)))

    return composed()


def _next_stage(pipeline: p.Pipeline) -> SearchStrategy[Any]:
    from hypothesis import strategies as st

    options: list[SearchStrategy[Any]] = [stages(), stages(), st.just(chained)]
    if pipeline.stages and isinstance(pipeline.stages[-1], p.batch):
        options.append(st.just(p.unbatch()))
    try:
        p.pipe(pipeline, p.sample(p.shuffled()))
    except TypeError:
        pass  # a stream
    else:
        options.append(st.builds(p.sample, _orders()))
    return st.one_of(options)


def _with_shards(pipeline: p.Pipeline, place: int, shards: int) -> p.Pipeline:
    """Insert a `shard_by_worker` where that leaves a valid pipeline: a `sample` may not follow it on a stream."""
    before, after = pipeline.stages[:place], pipeline.stages[place:]
    try:
        return p.pipe(pipeline.source, *before, p.shard_by_worker(shards), *after)
    except (TypeError, ValueError):
        return pipeline


class _Seam(p.Elementwise):
    """What `pin` is, without an accelerator and its warning: a one-to-one stage that runs in the consumer."""

    exact = True
    keeps_index = True
    consumer = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seam)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "_Seam()"

    def apply(self, x: Any, key: tuple[int, ...], context: p.Context) -> tuple[Any]:
        """See `Elementwise.apply`."""
        """See `Elementwise.apply`."""
        return (x,)


def _seam() -> p.Stage:
    return _Seam()
