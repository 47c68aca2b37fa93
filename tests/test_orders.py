"""Orders: `shuffled` is an exact, unbiased bijection; the others draw what they promise; any sampler is an order."""

from __future__ import annotations

import collections
import itertools
import math
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from pipes import (
    Order,
    batch,
    from_map,
    map,
    pipe,
    repeat,
    sample,
    sequential,
    shuffled,
    shuffled_subset,
    subset,
    take,
    weighted,
    with_replacement,
)
from pipes.orders import BLOCK, EXACT_UP_TO, ROUNDS, _Blockwise, feistel
from pipes.seeds import Key, derive, random_words

type Indices = npt.NDArray[np.int64]

LIMIT = 4.5  # standard deviations; every seed here is fixed, so a pass stays a pass
SEEDS = 2_000


def key_of(seed: int) -> Key:
    return derive(seed, "test_orders")


def visit(order: Order, n: int, seed: int) -> Indices:
    return order.bind(n, key_of(seed))(np.arange(order.length(n)))


def permutations(n: int, seeds: int) -> Indices:
    return np.array([visit(shuffled(), n, seed) for seed in range(seeds)])


def chi_square(observed: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    o, e = np.asarray(observed, np.float64), np.asarray(expected, np.float64)
    return float(((o - e) ** 2 / e).sum())


def deviations(statistic: float, degrees: int) -> float:
    """Standard deviations of a chi-square statistic from its mean (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def assert_frequencies(drawn: npt.ArrayLike, probabilities: Sequence[float]) -> None:
    counts = np.bincount(np.ravel(drawn), minlength=len(probabilities))
    p = np.array(probabilities)
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * counts.sum()
    assert abs(deviations(chi_square(counts[p > 0], expected), len(expected) - 1)) < LIMIT


def assert_positions_independent_of_elements(shuffles: Indices, bins: int) -> None:
    """(position, element) counts; rows and columns are fixed, hence the factor (n-1)/n and (bins-1)^2 degrees."""
    n = shuffles.shape[1]
    coarse = np.arange(n) * bins // n
    table = np.zeros((bins, bins), np.int64)
    for shuffle in shuffles:
        table += np.bincount(coarse * bins + coarse[shuffle], minlength=bins * bins).reshape(bins, bins)
    sizes = np.bincount(coarse)
    expected = len(shuffles) * np.outer(sizes, sizes) / n
    statistic = chi_square(table, expected) * (n - 1) / n
    assert abs(deviations(statistic, (bins - 1) ** 2)) < LIMIT


def assert_fixed_points(shuffles: Indices) -> None:
    """Mean 1 and variance 1 in each permutation, whatever its length above 1."""
    total = int((shuffles == np.arange(shuffles.shape[1])).sum())
    assert abs(total - len(shuffles)) / math.sqrt(len(shuffles)) < LIMIT


def assert_adjacent_pairs(shuffles: Indices) -> None:
    """How often an element is followed by its successor."""
    n = shuffles.shape[1]
    mean = (n - 1) / n
    variance = mean + (n - 2) / n - mean**2
    total = int((np.diff(shuffles, axis=1) == 1).sum())
    assert abs(total - mean * len(shuffles)) / math.sqrt(variance * len(shuffles)) < LIMIT


# -- shuffled: exact ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 7, 1000, EXACT_UP_TO - 1, EXACT_UP_TO, EXACT_UP_TO + 1, 2**16, 2**16 + 1, 10**5]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_shuffled_visits_each_index_exactly_once(n: int, seed: int) -> None:
    assert np.array_equal(np.sort(visit(shuffled(), n, seed)), np.arange(n))


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64))
def test_the_feistel_network_is_a_bijection_at_small_lengths_too(n: int, seed: int) -> None:
    found = feistel(np.arange(n), n, random_words(key_of(seed), 0, ROUNDS))
    assert np.array_equal(np.sort(found), np.arange(n))


@given(st.data())
def test_the_index_at_a_position_needs_no_other_position(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([5, EXACT_UP_TO, EXACT_UP_TO + 1, 10**5, 10**9, 2**40]))
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    at = shuffled().bind(n, key_of(n))
    together = at(np.array(positions))
    assert together.dtype == np.int64
    assert ((together >= 0) & (together < n)).all()
    assert together.tolist() == [int(shuffled().bind(n, key_of(n))(np.array([p]))[0]) for p in positions]


@st.composite
def access_patterns(draw: st.DrawFn, n: int) -> list[list[int]]:
    spans = st.tuples(st.integers(0, n - 1), st.integers(0, 300)).map(lambda s: list(range(s[0], min(n, s[0] + s[1]))))
    jumps = st.lists(st.integers(0, n - 1), max_size=30)
    edges = st.integers(0, n // BLOCK).map(lambda b: [p for p in range(b * BLOCK - 2, b * BLOCK + 3) if 0 <= p < n])
    return draw(st.lists(st.one_of(spans, jumps, edges, edges.map(lambda e: e[::-1])), max_size=12))


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on a position outside the range, from which the cycle walk might never return."""

    def checked(positions: Indices, n: int, keys: npt.NDArray[np.uint64]) -> Indices:
        assert ((positions >= 0) & (positions < n)).all(), f"positions outside 0..{n - 1} would walk for ever"
        return feistel(positions, n, keys)

    monkeypatch.setattr("pipes.orders.feistel", checked)


@pytest.mark.usefixtures("guarded")
def test_empty_fetches_between_others_do_not_walk_for_ever() -> None:
    cached, nothing = _Blockwise(10**5, key_of(0)), np.empty(0, np.int64)
    for positions in (np.arange(3), np.arange(3), nothing, nothing, nothing, np.arange(3)):
        assert len(cached(positions)) == len(positions)


@pytest.mark.usefixtures("guarded")
@given(st.data())
def test_cached_blocks_equal_direct_computation_under_any_access_pattern(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 10**5]))
    key = key_of(data.draw(st.integers(0, 100)))
    cached = _Blockwise(n, key)
    for positions in data.draw(access_patterns(n)):
        wanted = feistel(np.array(positions, np.int64), n, random_words(key, 0, ROUNDS))
        assert np.array_equal(cached(np.array(positions, np.int64)), wanted)


@pytest.mark.parametrize("step", [1, 7, 256])
def test_reading_in_sequence_equals_reading_at_once(step: int) -> None:
    n = 2 * BLOCK + 100
    cached = _Blockwise(n, key_of(0))
    pieces = [cached(np.arange(a, min(n, a + step))) for a in range(0, n, step)]
    assert np.array_equal(np.concatenate(pieces), feistel(np.arange(n), n, random_words(key_of(0), 0, ROUNDS)))


def test_changing_the_answer_does_not_change_the_order() -> None:
    for n in (10, 10**5):
        at = shuffled().bind(n, key_of(0))
        first = [at(np.arange(10)), at(np.arange(10)), at(np.arange(10))]
        kept = first[0].copy()
        for answer in first:
            answer[:] = -1
        assert np.array_equal(at(np.arange(10)), kept)


# -- shuffled: unbiased ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "seeds"), [(3, 6_000), (4, 12_000), (5, 24_000)])
def test_every_whole_permutation_is_equally_likely(n: int, seeds: int) -> None:
    counts = collections.Counter(builtin_tuples(permutations(n, seeds)))
    every = list(itertools.permutations(range(n)))
    statistic = chi_square([counts[p] for p in every], seeds / len(every))
    assert abs(deviations(statistic, len(every) - 1)) < LIMIT


def builtin_tuples(rows: Indices) -> Iterator[tuple[int, ...]]:
    return (tuple(row) for row in rows.tolist())


@pytest.mark.parametrize("n", [2, 3, 5, 10, 100, 1000])
def test_position_and_element_are_independent(n: int) -> None:
    shuffles = permutations(n, SEEDS)
    assert_positions_independent_of_elements(shuffles, n)
    assert_fixed_points(shuffles)
    assert_adjacent_pairs(shuffles)


@pytest.mark.parametrize("n", [EXACT_UP_TO - 1, EXACT_UP_TO, EXACT_UP_TO + 1, 10**5])
def test_long_permutations_are_unbiased_in_spots(n: int) -> None:
    shuffles = permutations(n, 30)
    assert_positions_independent_of_elements(shuffles, 32)
    assert_fixed_points(shuffles)
    assert_adjacent_pairs(shuffles)


@pytest.mark.parametrize("n", [EXACT_UP_TO + 1, 10**9])
def test_one_position_is_uniform_over_seeds_in_a_long_permutation(n: int) -> None:
    for position in (0, n // 2, n - 1):
        drawn = [int(shuffled().bind(n, key_of(s))(np.array([position]))[0]) * 50 // n for s in range(SEEDS)]
        assert_frequencies(drawn, [1 / 50] * 50)


def test_the_first_of_a_billion_indices_takes_no_time_and_no_memory() -> None:
    times = []
    for seed in range(3):
        begin = time.perf_counter()
        assert 0 <= int(shuffled().bind(10**9, key_of(seed))(np.array([0]))[0]) < 10**9
        times.append(time.perf_counter() - begin)
    tracemalloc.start()
    try:
        shuffled().bind(10**9, key_of(9))(np.array([0]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
    assert min(times) < 0.05


def test_a_pipeline_over_a_billion_samples_gives_its_first_at_once() -> None:
    tracemalloc.start()
    try:
        first = next(iter(pipe(from_map(range(10**9)), sample(shuffled()), batch(64))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(first)) == 64
    assert peak < 10_000_000


@pytest.mark.parametrize("order", [shuffled(), with_replacement(50), shuffled_subset(range(50))], ids=repr)
def test_orders_of_different_seeds_and_epochs_differ(order: Order) -> None:
    p = pipe(range(50), sample(order))
    runs = [list(p.seeded(seed).at_epoch(epoch)) for seed in range(4) for epoch in range(4)]
    assert all(a != b for a, b in itertools.combinations(runs, 2))


def test_a_seed_in_epoch_one_is_not_the_next_seed_in_epoch_zero() -> None:
    for n in (20, 10**5):
        p = pipe(range(n), sample(shuffled()), take(20))
        for seed in range(5):
            assert list(p.seeded(seed).at_epoch(1)) != list(p.seeded(seed + 1).at_epoch(0))


def test_two_samples_in_one_pipeline_draw_different_orders() -> None:
    once = list(pipe(range(50), sample(shuffled())))
    twice = list(pipe(range(50), sample(shuffled()), sample(shuffled())))
    assert twice != [once[i] for i in once]


def test_repeat_shuffles_each_time_afresh_as_the_next_epoch() -> None:
    p = pipe(range(20), sample(shuffled()))
    assert list(pipe(p, repeat(3))) == [x for epoch in range(3) for x in p.at_epoch(epoch)]


# -- known answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "n", "known"),
    [
        (shuffled(), 10, [0, 5, 2, 3, 9, 8, 1, 7]),
        (shuffled(), 100_003, [2441, 5857, 59329, 83847, 99697, 8175, 67156, 60215]),
        (shuffled(), 200_003, [91446, 115624, 1917, 90860, 1880, 115781, 95684, 76336]),
        (shuffled(), 10**9, [240309557, 55764055, 56008549, 969166261, 97731575, 722453678, 408099178, 740486658]),
        (with_replacement(8), 100, [90, 11, 91, 54, 40, 26, 64, 33]),
        (weighted([1, 2, 3, 4], 8), 4, [3, 1, 3, 2, 2, 1, 3, 2]),
        (weighted([1, 2, 3, 4], 4, replacement=False), 4, [1, 3, 2, 0]),
    ],
    ids=repr,
)
def test_an_order_is_the_same_on_every_platform_and_in_every_version(order: Order, n: int, known: list[int]) -> None:
    at = order.bind(n, derive(0, "known"))
    assert at(np.arange(len(known))).tolist() == known


def test_a_pipelines_order_is_the_same_on_every_platform_and_in_every_version() -> None:
    p = pipe(range(10), sample(shuffled())).seeded(3).at_epoch(2)
    assert list(p) == [9, 1, 0, 6, 7, 5, 2, 4, 8, 3]


# -- drawing orders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_with_replacement_is_uniform(n: int) -> None:
    drawn = visit(with_replacement(100 * n + 5000), n, n)
    assert len(drawn) == 100 * n + 5000
    if n > 1:
        assert_frequencies(drawn, [1 / n] * n)


def test_with_replacement_draws_are_independent_of_their_neighbours() -> None:
    drawn = visit(with_replacement(40_001), 7, 0)
    assert_frequencies(drawn[:-1] * 7 + drawn[1:], [1 / 49] * 49)


@pytest.mark.parametrize(
    "weights",
    [[1.0], [1, 1], [0.0, 3.0, 0.0], [1, 2, 3, 4, 0, 5], [1e-300, 2e-300, 1e-300], [5e-324, 5e-324], [1e300, 2e300]],
    ids=repr,
)
def test_weighted_draws_in_proportion_to_weights_and_never_an_index_of_weight_zero(weights: list[float]) -> None:
    drawn = visit(weighted(weights, 20_000), len(weights), 1)
    positive = np.array(weights) > 0
    assert positive[drawn].all()
    if positive.sum() > 1:
        scaled = np.array(weights) / max(weights)
        assert_frequencies(drawn, (scaled / scaled.sum()).tolist())


def test_weights_whose_sum_overflows_are_drawn_in_proportion() -> None:
    assert_frequencies(visit(weighted([1e308, 1e308, 1e308], 20_000), 3, 0), [1 / 3] * 3)


@pytest.mark.parametrize("weights", [[0.0, 5e-324], [0.0, 0.0, 1e-310, 0.0], [0.0, 1e300, 1e-20]], ids=repr)
def test_tiny_weights_are_drawn_before_weight_zero_without_replacement(weights: list[float]) -> None:
    positive = np.flatnonzero(weights).tolist()
    for seed in range(20):
        order = weighted(weights, len(positive), replacement=False)
        assert sorted(visit(order, len(weights), seed).tolist()) == positive


def test_weighted_without_replacement_has_the_distribution_of_successive_draws() -> None:
    weights, seeds = [1.0, 2.0, 3.0, 0.0, 4.0], 20_000
    order = weighted(weights, 2, replacement=False)
    pairs = np.array([visit(order, 5, seed) for seed in range(seeds)])
    expected = np.zeros((5, 5))
    for a, b in itertools.permutations(range(5), 2):
        expected[a, b] = weights[a] / 10 * weights[b] / (10 - weights[a])
    assert_frequencies(pairs[:, 0] * 5 + pairs[:, 1], expected.ravel().tolist())


def test_weighted_without_replacement_draws_distinct_indices() -> None:
    weights = np.random.default_rng(0).random(1000) + 0.01
    drawn = visit(weighted(weights, 1000, replacement=False), 1000, 0)
    assert sorted(drawn.tolist()) == list(range(1000))


def test_weighted_works_beyond_torchs_limit_of_two_to_the_24_weights() -> None:
    n = 2**24 + 10
    weights = np.zeros(n)
    weights[[3, n - 1]] = 1.0, 3.0
    drawn = visit(weighted(weights, 4000), n, 0)
    assert set(drawn.tolist()) == {3, n - 1}
    assert_frequencies(drawn == n - 1, [0.25, 0.75])


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "array", "tensor"])
def test_weights_and_indices_may_be_lists_arrays_or_tensors(make: Callable[[Any], Any]) -> None:
    assert visit(weighted(make([0.0, 2.0]), 3), 2, 0).tolist() == [1, 1, 1]
    assert visit(subset(make([2, 0])), 3, 0).tolist() == [2, 0]
    assert sorted(visit(shuffled_subset(make([2, 0])), 3, 0).tolist()) == [0, 2]


def test_an_order_keeps_its_own_copy_of_what_it_was_given() -> None:
    indices, weights = np.array([2, 0]), np.array([0.0, 1.0])
    orders = subset(indices), weighted(weights, 2)
    indices[:], weights[:] = 1, [1.0, 0.0]
    assert visit(orders[0], 3, 0).tolist() == [2, 0]
    assert visit(orders[1], 2, 0).tolist() == [1, 1]


def test_shuffled_subset_visits_each_once_and_every_arrangement_equally_often() -> None:
    drawn = [tuple(visit(shuffled_subset([4, 0, 9]), 10, s).tolist()) for s in range(6000)]
    counts = collections.Counter(drawn)
    every = list(itertools.permutations([4, 0, 9]))
    assert set(counts) == set(every)
    assert abs(deviations(chi_square([counts[p] for p in every], 1000), 5)) < LIMIT


def test_repeated_indices_are_visited_as_often_as_they_are_named() -> None:
    assert list(pipe("abc", sample(subset([1, 1, 2])))) == ["b", "b", "c"]
    assert sorted(pipe("abc", sample(shuffled_subset([1, 1, 2])))) == ["b", "b", "c"]


@pytest.mark.parametrize(
    "order",
    [
        sequential(),
        shuffled(),
        with_replacement(7),
        weighted([1, 2, 3, 4, 5], 7),
        weighted([1, 2, 3, 4, 5], 3, replacement=False),
        subset([4, 0]),
        shuffled_subset([4, 0, 1]),
        [3, 0, 3],
        range(4, -1, -1),
        np.array([1, 2]),
        torch.tensor([1, 2]),
        [],
    ],
    ids=repr,
)
def test_positions_of_a_sampled_pipeline_are_random_access(order: Any) -> None:
    p = pipe("abcde", sample(order))
    elements = list(p)
    assert len(p) == len(elements)
    assert [p[i] for i in range(len(p))] == elements


def test_an_order_of_ones_own_is_an_order() -> None:
    class backwards(Order):
        def bind(self, n: int, key: Key) -> Callable[[Indices], Indices]:
            return lambda positions: n - 1 - positions

    assert list(pipe("abc", sample(backwards()))) == ["c", "b", "a"]


# -- torch's samplers, callables and iterables -------------------------------------------------------------------------


def test_a_sequential_sampler_is_an_order() -> None:
    assert list(pipe("abc", sample(SequentialSampler("abc")))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("sampler", "drawn"),
    [
        (RandomSampler(range(20)), 20),
        (RandomSampler(range(20), replacement=True, num_samples=70), 70),
        (RandomSampler(range(20), num_samples=45), 45),
        (SubsetRandomSampler(range(5, 15)), 10),
        (WeightedRandomSampler([1.0] * 20, 30), 30),
    ],
    ids=["random", "replacement", "more than the source", "subset", "weighted"],
)
def test_torch_samplers_follow_seed_and_epoch_and_leave_torchs_generator_alone(sampler: Any, drawn: int) -> None:
    p = pipe(from_map(range(20)), sample(sampler))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = list(p)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert list(p) == first
    assert len(first) == drawn == len(p)
    assert list(p.at_epoch(1)) != first
    assert list(p.seeded(1)) != first


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_gives_lists_of_samples(drop_last: bool) -> None:
    sampler = BatchSampler(SequentialSampler(range(5)), 2, drop_last)
    expected = [["a", "b"], ["c", "d"]] + ([] if drop_last else [["e"]])
    assert list(pipe("abcde", sample(sampler))) == expected


def test_a_random_batch_sampler_follows_seed_and_epoch() -> None:
    p = pipe(range(20), sample(BatchSampler(RandomSampler(range(20)), 3, drop_last=False)))
    assert list(p) == list(p) != list(p.at_epoch(1))
    assert sorted(itertools.chain.from_iterable(p)) == list(range(20))


@pytest.mark.parametrize(
    "batches", [[[0, 1], [2]], [(0, 1), (2,)], [np.array([0, 1]), np.array([2])], [torch.tensor([0, 1]), [2]]]
)
def test_a_list_of_lists_of_indices_keeps_random_access(batches: Any) -> None:
    p = pipe("abc", sample(batches))
    assert list(p) == [["a", "b"], ["c"]]
    assert len(p) == 2
    assert p[1] == ["c"]


def test_an_empty_batch_of_indices_is_an_empty_batch_of_samples() -> None:
    assert list(pipe("abc", sample([[0], [], [1, 2]]))) == [["a"], [], ["b", "c"]]
    assert list(pipe("abc", sample(lambda _: iter([[0], [], [1, 2]])))) == [["a"], [], ["b", "c"]]


class Epochs:
    """A sampler in the manner of torch's DistributedSampler."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch % 3])

    def __len__(self) -> int:
        return 1


def test_a_sampler_is_told_its_epoch() -> None:
    p = pipe("abc", sample(Epochs()))
    assert [list(p.at_epoch(e)) for e in range(4)] == [["a"], ["b"], ["c"], ["a"]]
    assert list(pipe(p, repeat(3))) == ["a", "b", "c"]


class LazilyDrawing:
    """A sampler that draws each index when it is asked for it."""

    def __init__(self, draw: Callable[[], int]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return (self.draw() for _ in range(40))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.randrange(20),
        lambda: int(np.random.randint(20)),
        lambda: int(torch.randint(20, ())),
    ],
    ids=["random", "numpy", "torch"],
)
def test_a_sampler_that_draws_index_by_index_follows_the_seed_alone(draw: Callable[[], int]) -> None:
    p = pipe(range(20), sample(LazilyDrawing(draw)))
    first = list(p)
    draw()
    assert list(p) == first


def test_a_callable_order_gets_the_length() -> None:
    p = pipe("abcd", sample(lambda n: range(n - 1, -1, -1)))
    assert list(p) == ["d", "c", "b", "a"]
    assert len(p) == 4
    assert p[0] == "d"


def test_a_callable_order_with_rng_follows_seed_and_epoch() -> None:
    def order(n: int, rng: np.random.Generator) -> Indices:
        return rng.permutation(n)

    p = pipe(range(30), sample(order))
    first = list(p)
    assert first == list(p) == [p[i] for i in range(30)]
    assert sorted(first) == list(range(30))
    assert first != list(p.at_epoch(1)) != list(p.seeded(1))


def test_a_callable_order_that_draws_from_a_global_generator_is_seeded() -> None:
    def order(n: int) -> list[int]:
        return random.sample(range(n), n)

    p = pipe(range(30), sample(order))
    before = random.getstate()
    assert list(p) == list(p) == [p[i] for i in range(30)]
    assert random.getstate() == before
    assert list(p) != list(p.at_epoch(1))


def test_a_generator_function_is_an_order() -> None:
    def odd(n: int) -> Iterable[int]:
        yield from range(1, n, 2)

    p = pipe(range(6), sample(odd))
    assert list(p) == [1, 3, 5] == list(p)
    assert list(pipe(p, repeat(2))) == [1, 3, 5, 1, 3, 5]


def test_an_endless_order_is_drawn_as_it_is_asked_for() -> None:
    p = pipe("abc", sample(lambda n: itertools.cycle(range(n))), map(str.upper), batch(2), take(3))
    assert list(p) == [["A", "B"], ["C", "A"], ["B", "C"]]


def test_an_order_that_can_be_drawn_only_once_never_gives_an_empty_second_epoch() -> None:
    p = pipe("abc", sample(iter([2, 0])))
    assert list(p) == ["c", "a"]
    with pytest.raises(RuntimeError, match="one-shot"):
        list(p)
