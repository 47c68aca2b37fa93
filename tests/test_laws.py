"""The twelve laws, over generated stages and pipelines."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Awkward, elements, pipelines, sources, stages

import pipes as p
from pipes import Context
from pipes.isolation import Kept
from pipes.nodes import Drawing, Node, here
from pipes.testing import LawError, check_pipeline, check_stage
from pipes.values import same


def ahead_of(stage: p.Stage) -> int:
    """The bound that a stage's docstring states."""
    if isinstance(stage, p.shuffle_buffer):
        return stage.size
    if isinstance(stage, p.shard_by_rank):
        return stage.world_size or 0
    return 0


# Laws 1, 3, 4, 9, 11, 12 --------------------------------------------------------------------------------------------


@given(pipelines())
def test_purity_position_and_resume_hold_for_every_pipeline(pipeline: p.Pipeline) -> None:
    check_pipeline(pipeline, limit=60)


@given(stages(), elements())
def test_every_stage_is_pure_lazy_honest_about_errors_and_takes_none(stage: p.Stage, items: list[Any]) -> None:
    check_stage(stage, items, ahead=ahead_of(stage))


def identity_of(x: Any) -> Any:
    return x


EXPORTED: dict[str, Callable[[], Any]] = {
    "batch": lambda: p.batch(3),
    "collate": lambda: p.collate(builtins.list),
    "enumerate": lambda: p.enumerate(start=2),
    "filter": lambda: p.filter(str),
    "flat_map": lambda: p.flat_map(lambda x: [x, x]),
    "map": lambda: p.map(str),
    "repeat": lambda: p.repeat(2),
    "shard_by_rank": lambda: p.shard_by_rank(1, 2, uneven="pad"),
    "shard_by_worker": lambda: p.shard_by_worker(3),
    "shuffle_buffer": lambda: p.shuffle_buffer(4),
    "skip": lambda: p.skip(2),
    "take": lambda: p.take(4),
    "unbatch": p.unbatch,
    "pin": p.pin,
}


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.filterwarnings("ignore:pin.. found no accelerator")
def test_laws_of_every_exported_stage(name: str) -> None:
    stage = EXPORTED[name]()
    items: list[Any] = [[i] for i in range(7)]
    check_stage(stage, items, ahead=ahead_of(stage))


def test_the_list_of_exported_stages_is_complete() -> None:
    exported = {n for n in p.__all__ if isinstance(x := getattr(p, n), type) and issubclass(x, p.Stage)}
    assert exported - {"Stage", "Elementwise", "Block"} == {*EXPORTED, "sample"}


@given(st.integers(0, 40), st.integers(0, 3), st.integers(0, 3))
def test_laws_of_sample(size: int, seed: int, epoch: int) -> None:
    check_pipeline(p.pipe(range(size), p.sample(p.shuffled())).seeded(seed).at_epoch(epoch))


@given(stages())
def test_a_stage_survives_pickling_and_prints_as_code(stage: p.Stage) -> None:
    import pipes.testing.strategies as used

    assert cloudpickle.loads(cloudpickle.dumps(stage)) == stage
    assert hash(cloudpickle.loads(cloudpickle.dumps(stage))) == hash(stage)
    assert eval(repr(stage), {**vars(p), **vars(used)}) == stage


@given(st.data())
def test_awkward_elements_pass_block_stages(data: st.DataObject) -> None:
    items = [Awkward(0), None, np.arange(3), float("nan")]
    stage = data.draw(st.sampled_from([p.batch(2), p.take(3), p.skip(1), p.shuffle_buffer(3), p.repeat(2)]))
    check_pipeline(p.pipe(items, stage))
    check_pipeline(p.pipe(p.from_iterable(items), stage))


# Law 5 ----------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 14), st.booleans(), st.integers(1, 5), st.sampled_from(["keep", "drop", "pad"]))
def test_ranks_partition_the_source(size: int, stream: bool, world_size: int, uneven: str) -> None:
    source: p.Source = p.from_iterable(range(size)) if stream else p.from_map(range(size))
    whole = list(range(size))
    parts = [list(p.pipe(source, p.shard_by_rank(r, world_size, uneven=uneven))) for r in range(world_size)]
    rounds = [x for r in itertools.zip_longest(*parts, fillvalue=_ABSENT) for x in r if x is not _ABSENT]
    if uneven == "keep":
        assert rounds == whole
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert len({len(part) for part in parts}) == 1
        kept = len(whole) // world_size * world_size if uneven == "drop" else len(whole)
        assert rounds[:kept] == whole[:kept]
        assert set(rounds[kept:]) <= set(whole[kept // world_size * world_size :])


_ABSENT = object()


@given(pipelines(shards=False, stages_at_most=2), st.integers(1, 5))
def test_shards_partition_the_pipeline(pipeline: p.Pipeline, shards: int) -> None:
    if any(stage.consumer for stage in pipeline.stages):
        return
    sharded = p.pipe(pipeline, p.shard_by_worker(shards))
    assert same(list(sharded), list(pipeline))
    context = Context(pipeline.seed, pipeline.epoch, globals=Kept())
    with here(context):
        chains = [[y for y, _ in sharded.chain(context.at(shard=s)).run()] for s in range(shards)]
    assert max(map(len, chains)) - min(map(len, chains)) <= 1


@given(st.integers(0, 40), st.integers(1, 4), st.integers(0, 3))
def test_a_rank_draws_for_an_element_what_the_whole_draws(size: int, world_size: int, seed: int) -> None:
    from pipes.testing.strategies import jittered, noisy

    def of(*stages: p.Stage) -> list[Any]:
        return list(p.pipe(range(size), *stages, p.map(jittered), p.map(noisy)).seeded(seed))

    parts = [of(p.shard_by_rank(rank, world_size)) for rank in range(world_size)]
    assert [x for r in itertools.zip_longest(*parts) for x in r if x is not None] == of()
    assert of(p.skip(3)) == of()[3:]


# Laws 6 and 7 ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(0, 2**40), st.integers(0, 5))
def test_shuffled_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(p.pipe(range(size), p.sample(p.shuffled())).seeded(seed).at_epoch(epoch)) == list(range(size))


@given(st.lists(st.integers(), max_size=60), st.integers(1, 12), st.integers(0, 50))
def test_shuffle_buffer_permutes_and_moves_nothing_far(items: list[int], size: int, seed: int) -> None:
    moved = list(p.pipe(range(len(items)), p.shuffle_buffer(size)).seeded(seed))
    assert sorted(moved) == list(range(len(items)))
    assert all(abs(i - x) <= size - 1 for i, x in enumerate(moved))
    assert list(p.pipe(items, p.shuffle_buffer(1)).seeded(seed)) == items


# Law 8 ----------------------------------------------------------------------------------------------------------------


@given(elements(), st.integers(1, 5))
def test_batch_agrees_with_itertools_and_unbatch_undoes_it(items: list[Any], size: int) -> None:
    batches = list(p.pipe(items, p.batch(size)))
    assert same(batches, [list(b) for b in itertools.batched(items, size, strict=False)])
    assert same(list(p.pipe(items, p.batch(size), p.unbatch())), items)


@given(elements(), st.integers(0, 9))
def test_take_and_skip_split_and_concat_joins(items: list[Any], size: int) -> None:
    for source in (p.from_map(items), p.from_iterable(items)):
        first, rest = p.pipe(source, p.take(size)), p.pipe(source, p.skip(size))
        assert same([*first, *rest], items)
        assert same(list(p.concat(first, rest)), items)


@given(elements())
def test_maps_compose(items: list[Any]) -> None:
    one, two = p.pipe(items, p.map(repr), p.map(len)), p.pipe(items, p.map(lambda x: len(repr(x))))
    assert list(one) == list(two) == list(p.map(len)(p.map(repr)(items)))


@given(sources(), st.integers(1, 3), st.integers(0, 3))
def test_repetitions_are_epochs(source: p.Source, times: int, epoch: int) -> None:
    from pipes.testing.strategies import jittered, noisy

    once = p.pipe(source, p.shuffle_buffer(3), p.map(jittered), p.map(noisy))
    repeated = p.pipe(once, p.repeat(times)).at_epoch(epoch)
    assert same(list(repeated), [x for r in range(times) for x in once.at_epoch(epoch * times + r)])


# Law 10 ---------------------------------------------------------------------------------------------------------------


def test_no_two_draws_share_a_key() -> None:
    contexts = [
        Context(seed, epoch, shard, path, f"map#{occurrence}")
        for seed in range(5)
        for epoch in range(5)
        for shard in (None, 0, 1)
        for path in ((), (("zip", 0),), (("zip", 1),))
        for occurrence in range(3)
    ]
    draws = {int(c.rng((0, 0, index)).integers(2**63)) for c in contexts for index in range(10)}
    assert len(draws) == 10 * len(contexts)


def draw(_: Any, rng: np.random.Generator) -> int:
    return int(rng.integers(2**60))


@given(st.integers(0, 5))
def test_an_identity_stage_changes_no_draw(seed: int) -> None:
    plain = p.pipe(range(9), p.sample(p.shuffled()), p.map(draw)).seeded(seed)
    padded = p.pipe(range(9), p.skip(0), p.sample(p.shuffled()), p.take(9), p.map(draw)).seeded(seed)
    assert list(plain) == list(padded)


def test_seed_and_epoch_are_not_added() -> None:
    pipeline = p.pipe(range(50), p.map(draw))
    runs = [tuple(pipeline.seeded(s).at_epoch(e)) for s in range(4) for e in range(4)]
    assert len({x for run in runs for x in run}) == 50 * len(runs)


# The laws can fail ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stateful(p.Block):
    seen: ClassVar[list[Any]] = []

    def outputs(self, k: int, block: list[Any], context: Context) -> list[Any]:
        self.seen.append(block)
        return [(len(self.seen), block)]


@dataclass(frozen=True)
class _WrongLength(p.take):
    def length(self, n: int | float, context: Context) -> int | float:
        return max(0, super().length(n, context) - 1)


@dataclass(frozen=True)
class _WrongPositions(p.skip):
    def at(self, positions: Any, n: int | float, context: Context) -> Any:
        return np.maximum(positions + self.size - 1, 0)


class _ForgetfulNode(Node):
    def __init__(self, up: Node, context: Context) -> None:
        self.up, self.context = up, context

    def run(self, cursor: Any = None) -> Iterator[tuple[Any, Any]]:
        for x, _ in self.up.run():
            yield x, 0


@dataclass(frozen=True)
class _Forgetful(p.Stage):
    def bind(self, upstream: Any, context: Context) -> Node:
        return _ForgetfulNode(upstream(context), context)


def _greedy(items: Iterable[Any]) -> Iterator[Any]:
    return iter(list(items))


def _hasty(items: Iterable[Any]) -> Iterator[Any]:
    held: list[Any] = []
    for x in items:
        held.append(x)
        if len(held) == 3:
            yield held.pop(0)
    yield from held


def _mutating(items: Iterable[Any]) -> Iterator[Any]:
    for x in items:
        x.append(0)
        yield x


def _swallowing(items: Iterable[Any]) -> Iterator[Any]:
    it = iter(items)
    while True:
        try:
            yield next(it)
        except Exception:
            return


def _renaming(items: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from items
    except Exception as error:
        raise KeyError("other") from error


class _DropsNone(p.Block):
    def outputs(self, k: int, block: list[Any], context: Context) -> list[Any]:
        return [x for x in block if x is not None]

    def __repr__(self) -> str:
        return "_DropsNone()"


@dataclass(frozen=True)
class _DrawsAtRandom(p.Stage):
    def bind(self, upstream: Any, context: Context) -> Node:
        rng = np.random.default_rng()
        up = upstream(context)
        return Drawing(lambda _: ((x, rng.random()) for x, _ in up.run()), context, self)


@dataclass(frozen=True)
class _TouchesGlobals(p.Block):
    def outputs(self, k: int, block: list[Any], context: Context) -> list[Any]:
        import random

        random.random()
        return block


BROKEN: list[tuple[Any, str]] = [
    (_Stateful(), "purity"),
    (_DrawsAtRandom(), "purity|laziness"),
    (_TouchesGlobals(), "purity"),
    (_mutating, "purity"),
    (_WrongLength(5), "position"),
    (_WrongPositions(2), "position"),
    (_Forgetful(), "resume"),
    (_greedy, "laziness"),
    (_hasty, "laziness"),
    (_swallowing, "errors"),
    (_renaming, "errors"),
    (_DropsNone(), "none is an element"),
]


@pytest.mark.parametrize(("stage", "law"), BROKEN, ids=lambda x: getattr(x, "__name__", type(x).__name__))
def test_a_broken_stage_is_rejected(stage: Any, law: str) -> None:
    with pytest.raises(LawError, match=law):
        check_stage(stage, [[i] for i in range(6)])


def test_a_pipeline_whose_data_set_is_impure_is_rejected() -> None:
    class Impure(list[int]):
        reads = 0

        def __getitem__(self, i: Any) -> Any:
            Impure.reads += 1
            return Impure.reads

    with pytest.raises(LawError, match="purity"):
        check_pipeline(p.pipe(Impure([1, 2, 3])))
