"""`Pipeline` and `pipe`: a source and stages, composed into a value.

Laws: a pipeline is immutable and has no state, so running it twice gives two independent, equal runs; its `repr` is the
code that made it; `len(p) == len(list(p))` and `p[i] == list(p)[i]` wherever they are defined; whatever is wrong with
the composition is an error when it is made.
"""

from __future__ import annotations

import builtins
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from pipes.combining import Merged
from pipes.context import Context, Cursor, Pair
from pipes.errors import check_size
from pipes.heads import Head, PositionHead, drawn_here
from pipes.isolation import Kept
from pipes.nodes import ENDLESS, Indexed, Length, Node, Segment, delivered, here, seeded, through
from pipes.ordering import skip, take
from pipes.sharding import shard_by_worker
from pipes.sources import as_source
from pipes.stage import Source, Stage, as_stage
from pipes.values import Value, value


@value
class Pipeline(Value):
    """A source and stages. Made by `pipe`; iterate it to run it here, or give it to `execute`.

    >>> from pipes import pipe, map
    >>> p = pipe(range(4), map(str))
    >>> list(p), len(p), p[3], list(p[1:3])
    (['0', '1', '2', '3'], 4, '3', ['1', '2'])
    >>> p
    pipe(from_map(range(0, 4)), map(str))
    """

    source: Source
    stages: tuple[Stage, ...] = ()
    seed: int = field(default=0, kw_only=True)
    epoch: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(builtins.map(as_stage, self.stages)))
        object.__setattr__(self, "seed", check_seed(self.seed))
        object.__setattr__(self, "epoch", check_size("epoch", self.epoch, least=0))
        self._check_shards()
        self._check_replays()
        self.bind(Context(self.seed, self.epoch))

    def _check_shards(self) -> None:
        shards = [i for i, stage in builtins.enumerate(self.stages) if isinstance(stage, shard_by_worker)]
        if len(shards) > 1:
            raise ValueError(f"a pipeline must have at most one shard_by_worker, got {len(shards)}; remove one")
        placed = next((i for i, stage in builtins.enumerate(self.stages) if stage.consumer), len(self.stages))
        if shards and placed < shards[0]:
            raise ValueError(
                f"{self.stages[shards[0]]!r} must come before {self.stages[placed]!r}, which runs in the consumer; "
                "swap them"
            )

    def _check_replays(self) -> None:
        once: Source | Stage | None = None
        parts: tuple[Source | Stage, ...] = (self.source, *self.stages)
        for part in parts:
            if once is not None and getattr(part, "replays", False):
                raise ValueError(
                    f"{part!r} runs what is before it more than once, got the one-shot iterator of {once!r}; "
                    "pass from_iterable a function that makes a fresh iterator, and sample a list"
                )
            once = part if getattr(part, "one_shot", False) else once

    # -- running ---------------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> list[str]:
        """Each stage's name with its occurrence, which identity stages of other names do not change."""
        seen: Counter[str] = Counter()
        names = []
        for stage in self.stages:
            name = type(stage).__name__
            names.append(f"{name}#{seen[name]}")
            seen[name] += 1
        return names

    @cached_property
    def merge(self) -> int | None:
        """How many stages come before the merge of the shards; None where there is no `shard_by_worker`."""
        first = next((i for i, s in builtins.enumerate(self.stages) if isinstance(s, shard_by_worker)), None)
        if first is None:
            return None
        rest = range(first, len(self.stages))
        return next((i for i in rest if self.stages[i].consumer), len(self.stages))

    def bind(self, context: Context, size: int | None = None) -> Node:
        """Return the first `size` stages (default: all) as a node under a context."""
        size = len(self.stages) if size is None else size
        if size == self.merge and context.shard is None:
            shards = next(s.shards for s in self.stages if isinstance(s, shard_by_worker))
            chains = [self.chain(context.at(shard=shard, runner=None)) for shard in range(shards)]
            return Merged(chains, context)
        return self._bind(context, size, self.bind)

    def chain(self, context: Context, size: int | None = None) -> Node:
        """Return the first `size` stages (default: up to the merge) of one shard; `context.shard` is its number."""

        def bind(c: Context, size: int) -> Node:
            return self._bind(c, size, bind)

        return bind(context, (self.merge or len(self.stages)) if size is None else size)

    def _bind(self, context: Context, size: int, below: Callable[[Context, int], Node]) -> Node:
        if size == 0:
            return self.source.bind(context)
        name, runner = context.name, context.runner

        def upstream(c: Context) -> Node:
            return below(c.at(name=name, runner=runner), size - 1)

        here = None if runner is None or size > self.head_size else runner  # what comes behind the head runs here
        return self.stages[size - 1].bind(upstream, context.at(name=self.names[size - 1], runner=here))

    @cached_property
    def head_size(self) -> int:
        """How many stages workers compute, or the consumer draws for them; with shards, those before the merge."""
        if self.merge is not None:
            return self.merge
        for size, stage in builtins.enumerate(self.stages):
            node = self.bind(Context(), size + 1)
            if stage.consumer or not (isinstance(node, (Indexed, Head)) or drawn_here(node)):
                return size
        return len(self.stages)

    @property
    def one_shot(self) -> bool:
        """Whether it can be run only once: its source, or the order of a `sample`, is an iterator."""
        return any(getattr(part, "one_shot", False) for part in (self.source, *self.stages))

    def run(self, context: Context, cursor: Cursor = None) -> Iterator[Pair]:
        """Run under a context, from a cursor; the caller's global generators are kept around each output."""
        return _numbered(delivered(self.bind(context).run(cursor), context))

    def __iter__(self) -> Iterator[Any]:
        return (x for x, _ in self.run(Context(self.seed, self.epoch, globals=Kept())))

    # -- as a sequence ---------------------------------------------------------------------------------------------

    @cached_property
    def _node(self) -> Node:
        return self.bind(Context(self.seed, self.epoch, globals=Kept()))

    @property
    def length(self) -> Length:
        """The number of outputs: an int, `math.inf` where it is endless, None where it is unknown."""
        return self._node.n

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"the length of {self!r} is unknown: it has a stream in it; count it by iterating")
        if self.length == ENDLESS:
            raise TypeError(f"{self!r} is endless and has no length; put take(size) at its end")
        return int(self.length)

    def __bool__(self) -> bool:
        return True  # else `if pipeline:` would ask for a length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            if self.merge is not None and self.merge == len(self.stages):
                raise TypeError(f"{self!r} has no slices: stages behind shard_by_worker are per shard; slice before it")
            return self._slice(index)
        i = operator.index(index)
        n = self.length
        if not _has_random_access(self._node):
            raise TypeError(f"{self!r} is a stream without random access; use skip(n) and take(n), or iterate it")
        if n is not None and i < 0 and n != ENDLESS:
            i += int(n)
        if i < 0 or (n is not None and i >= n):
            raise IndexError(f"index {index} is out of range for length {n} of {self!r}")
        with here(self._node.context):
            return _element(self._node, i)

    def _slice(self, index: slice) -> Pipeline:
        start, stop, step = index.start or 0, index.stop, 1 if index.step is None else index.step
        if step != 1:
            raise ValueError(f"the step of a slice must be 1, got {step}; use sample(range(start, stop, step))")
        if min(start, stop or 0) < 0:
            start, stop, _ = index.indices(len(self))
        stages = [skip(start)] if start else []
        return pipe(self, *stages, *([] if stop is None else [take(max(stop - start, 0))]))

    def as_torch(self) -> Any:
        """Return the pipeline as torch's `IterableDataset`, for what takes nothing else.

        >>> from pipes import pipe, batch
        >>> from torch.utils.data import DataLoader
        >>> list(DataLoader(pipe(range(5), batch(2)).as_torch(), batch_size=None, num_workers=0))
        [[0, 1], [2, 3], [4]]

        Give torch's DataLoader `batch_size=None`; its workers then divide the outputs among them, and the order is this
        pipeline's for any number. On a stream each of them computes what comes before as well. `set_epoch(n)` of what
        is returned chooses the epoch of the next `iter`; not with `persistent_workers`, which hold a copy.
        """
        from pipes.drop_in.as_torch import PipelineDataset  # it is made of pipelines, and needs torch

        return PipelineDataset(self)

    # -- as a value ------------------------------------------------------------------------------------------------

    def seeded(self, seed: int) -> Pipeline:
        """Return this pipeline with another seed."""
        return replace(self, seed=check_seed(seed))

    def at_epoch(self, epoch: int) -> Pipeline:
        """Return this pipeline in another epoch."""
        return replace(self, epoch=check_size("epoch", epoch, least=0))

    def __repr__(self) -> str:
        parts = [repr(self.source), *builtins.map(repr, self.stages)]
        if not self.stages and not isinstance(self.source, Joint):
            text = f"pipe({parts[0]})"
        elif not self.stages:
            text = parts[0]
        else:
            lines = f"pipe({', '.join(parts)})"
            text = lines if len(lines) <= LINE else "pipe(\n    " + ",\n    ".join(parts) + ",\n)"
        text += f".seeded({self.seed})" if self.seed else ""
        return text + (f".at_epoch({self.epoch})" if self.epoch else "")

    def explain(self) -> str:
        """Return a table: each stage, its length, its access, what it holds in memory and where it runs.

        >>> from pipes import pipe, batch, filter, pin
        >>> print(pipe(range(10), filter(bool), batch(2)).explain())
        stage                   length   access  holds              runs in
        from_map(range(0, 10))  10       random  what it was given  workers
        filter(bool)            unknown  stream  up to 32 elements  workers
        batch(2)                unknown  stream  2 elements         consumer
        """
        context = Context(self.seed, self.epoch)
        rows = [("stage", "length", "access", "holds", "runs in")]
        parts: tuple[Source | Stage, ...] = (self.source, *self.stages)
        for size, part in builtins.enumerate(parts):
            sharded = self.merge is not None and size <= self.merge
            node = self.chain(context.at(shard=0), size) if sharded else self.bind(context, size)
            in_head = size <= self.head_size and not drawn_here(node)
            where = "shards, in workers" if sharded else "workers" if in_head else "consumer"
            access = "random" if _has_random_access(node) else "stream"
            n = "unknown" if node.n is None else "endless" if node.n == ENDLESS else str(node.n)
            rows.append((repr(part), n, access, part.holds(), where))
        widths = [max(builtins.map(len, column)) for column in builtins.zip(*rows, strict=True)]
        return "\n".join("  ".join(c.ljust(w) for c, w in builtins.zip(r, widths, strict=True)).rstrip() for r in rows)


LINE = 100


def check_seed(seed: Any) -> int:
    """Return a seed: any integer of up to 64 bits."""
    return check_size("seed", seed, least=-(2**63), most=2**64 - 1)


class Joint(Source):
    """A source made of pipelines: prints as the call that made it, without `pipe` around it."""


def _numbered(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """Note on an error which output was being computed, where no stage said the same number."""
    k = 0
    try:
        for pair in pairs:
            yield pair
            k += 1
    except Exception as error:
        if not any(note.endswith(f"position {k}") for note in getattr(error, "__notes__", ())):
            error.add_note(f"pipes: while computing output {k}, counted from where this run began")
        raise


def _has_random_access(node: Node) -> bool:
    if isinstance(node, Segment):
        return node.exact and _has_random_access(node.up)
    return isinstance(node, Indexed) or (isinstance(node, PositionHead) and not node.steps)


def _element(node: Node, i: int) -> Any:
    """Compute one element: of a random-access node, or through one-to-one stages behind it."""
    if not isinstance(node, Segment):
        head = PositionHead(node) if isinstance(node, Indexed) else node
        return next(head.outputs(i, None))  # type: ignore[attr-defined]  # a PositionHead by now
    x, origin, salt = _element(node.up, i), node.up.origin(i), node.seeding()
    seed = None if salt is None else (*salt, *origin)
    return next(seeded(through(node.steps, x, origin), node.context, seed, at_most_one=True))


def pipe(source: Any, *stages: Any) -> Pipeline:
    """Compose a source and stages into a pipeline, or extend a pipeline by stages.

    >>> from pipes import batch, map
    >>> p = pipe([1, 2, 3], map(str), batch(2))
    >>> list(p)
    [['1', '2'], ['3']]
    >>> list(pipe(p, lambda batches: (len(b) for b in batches)))
    [2, 1]
    >>> pipe(batch(2), [1, 2, 3])
    Traceback (most recent call last):
    TypeError: the first argument of pipe must be a source, got batch(2); put from_map(...) before it

    A sequence becomes `from_map`, another iterable `from_iterable`. Any callable from iterable to iterator is a stage;
    it gets an `rng` of the run if it has a parameter of that name. Whatever is wrong is a `TypeError` or `ValueError`
    here, not at the first element.
    """
    start = source if isinstance(source, Pipeline) else Pipeline(as_source(source))
    return replace(start, stages=(*start.stages, *builtins.map(as_stage, stages)))
