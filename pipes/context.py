"""What reaches a stage from outside: the seed, the epoch, the shard and its place in the pipeline, and nothing else.

Laws: a context is a value; two contexts that differ in seed, epoch, shard, path or name have different keys; how a
pipeline is run (which generators are seeded, who computes the units) is no part of that value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from pipes import seeds
from pipes.isolation import Unseeded

type Cursor = Any
type Pair = tuple[Any, Cursor]


class Runner(Protocol):
    """Compute units or shards somewhere else; a run without one computes them here."""

    def units(self, head: Any, cursor: Cursor) -> Iterator[Pair]:
        """Run a head from `cursor`."""

    def shards(self, merge: Any, cursors: Sequence[Cursor]) -> list[Iterator[Pair]]:
        """Run every shard of a merge from its cursor."""

    def turn(self, shard: int) -> int:
        """Return the shard whose output comes next: the given one, or where order does not matter any that has one."""


_UNSEEDED = Unseeded()


@dataclass(frozen=True)
class Context:
    """The arguments of one run of one stage.

    `seed` and `epoch` are the run's; `shard` is the shard's number behind `shard_by_worker`; `path` names the
    enclosing joins and `name` the stage with its occurrence, as in `map#1`. The rest says how the run is done:
    `globals` seeds the global generators, `runner` computes units elsewhere, `empty` makes the arrays that results are
    collated into, and `deferred` names the stage whose conversion to tensors is left to the receiving process.
    """

    seed: int = 0
    epoch: int = 0
    shard: int | None = None
    path: tuple[Any, ...] = ()
    name: str = ""
    globals: Unseeded = field(default=_UNSEEDED, compare=False, repr=False)
    runner: Runner | None = field(default=None, compare=False, repr=False)
    empty: Callable[..., np.ndarray[Any, Any]] = field(default=np.empty, compare=False, repr=False)
    deferred: str = field(default="", compare=False, repr=False)

    @cached_property
    def key(self) -> seeds.Key:
        """The 128 bits that key every draw of this stage in this run."""
        return seeds.derive(self.seed, self.epoch, self.shard, self.path, self.name)

    @cached_property
    def unit_key(self) -> seeds.Key:
        """What keys the numbers of a run of positions: the same under every name."""
        return self.at(name="unit").key if self.name != "unit" else self.key

    def at(self, **changes: Any) -> Context:
        """Return this context with some parts changed."""
        return dataclasses.replace(self, **changes)

    def rng(self, key: tuple[int, ...]) -> np.random.Generator:
        """Return the element's own generator; `key` is what `apply` was given."""
        return seeds.generator(*self.key, *key)
