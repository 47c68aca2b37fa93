"""User code may draw from the global generators: its draws are keyed, and the caller's generators never notice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pipes import (
    Pipeline,
    batch,
    collate,
    concat,
    filter,
    flat_map,
    from_iterable,
    from_map,
    map,
    pipe,
    repeat,
    sample,
    shard_by_worker,
    shuffle_buffer,
    shuffled,
    zip,
)

type Draw = tuple[int, float, int, float, int]


def draw(_: Any = None) -> Draw:
    """Draw from all three, Gaussians too: an odd number of them leaves one cached."""
    return (
        random.getrandbits(60),
        random.gauss(),
        int(np.random.randint(2**31)),
        float(np.random.randn()),
        int(torch.randint(2**31, ())),
    )


class Drawing:
    """A dataset that draws from the global generators."""

    def __getitem__(self, i: int) -> tuple[int, Draw]:
        return i, draw()

    def __len__(self) -> int:
        return 6


def states() -> tuple[Any, ...]:
    name, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    of_torch = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), (name, words.tobytes(), position, has_gauss, gauss), of_torch


def fresh(cached: bool) -> None:
    """Seed the caller's generators; `cached` leaves one half of a pair of Gaussians waiting in each."""
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)
    if cached:
        random.gauss()
        np.random.randn()


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def keep(x: Any) -> bool:
    draw()
    return bool(x != 1)


def twice(x: Any) -> Iterator[tuple[Any, Draw]]:
    yield x, draw()
    yield x, draw()


def stream() -> from_iterable:
    return from_iterable(range(6))


PIPELINES: dict[str, Pipeline] = {
    "map": pipe(range(6), map(draw)),
    "map on a stream": pipe(stream(), map(draw)),
    "filter": pipe(range(6), filter(keep), map(draw)),
    "filter on a stream": pipe(stream(), filter(keep)),
    "flat_map": pipe(range(3), flat_map(twice)),
    "flat_map on a stream": pipe(stream(), flat_map(twice)),
    "dataset": pipe(from_map(Drawing())),
    "dataset in batches": pipe(from_map(Drawing()), sample(shuffled()), batch(2), map(draw)),
    "windows between": pipe(stream(), map(draw), shuffle_buffer(3), map(draw), batch(2)),
    "collate": pipe(range(6), batch(2), collate(draw)),
    "repeat": pipe(Drawing(), repeat(2)),
    "shards": pipe(Drawing(), shard_by_worker(2), map(draw), batch(2)),
    "concat": concat(pipe(range(3), map(draw)), pipe(stream(), map(draw))),
    "zip": zip(pipe(range(3), map(draw)), pipe(range(3), map(draw))),
    "an order that draws": pipe(range(6), sample(lambda n: random.sample(range(n), n)), map(draw)),
}


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached Gaussians"])
@pytest.mark.parametrize("name", PIPELINES)
def test_the_callers_generators_are_bit_equal_after_each_output(name: str, cached: bool) -> None:
    fresh(cached)
    before = states()
    for _ in PIPELINES[name]:
        assert states() == before
    assert states() == before


@pytest.mark.parametrize("name", PIPELINES)
def test_the_callers_own_draws_between_outputs_go_on_as_without_a_pipeline(name: str) -> None:
    fresh(cached=True)
    wanted = [draw() for _ in PIPELINES[name]]
    fresh(cached=True)
    assert [draw() for _ in PIPELINES[name]] == wanted


@pytest.mark.parametrize("name", PIPELINES)
def test_draws_depend_on_seed_and_epoch_alone(name: str) -> None:
    p = PIPELINES[name]
    first = list(p)
    draw()
    interrupted = []
    for x in p:
        draw()
        interrupted.append(x)
    assert first == interrupted == list(p)
    if name != "filter on a stream":
        assert len({repr(list(p.seeded(s).at_epoch(e))) for s in range(3) for e in range(3)}) == 9


def leaves(x: Any) -> Iterator[Draw]:
    if isinstance(x, tuple) and len(x) == 5:
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from leaves(y)


@pytest.mark.parametrize("name", PIPELINES)
def test_no_two_draws_of_a_run_are_equal(name: str) -> None:
    drawn = list(leaves(list(PIPELINES[name])))
    for generator in range(5):
        values = [d[generator] for d in drawn]
        assert len(set(values)) == len(values)


@pytest.mark.parametrize("name", ["map", "dataset", "dataset in batches", "repeat", "collate", "an order that draws"])
def test_an_element_by_its_index_draws_what_it_draws_in_the_run(name: str) -> None:
    p = PIPELINES[name]
    fresh(cached=True)
    before = states()
    wanted = list(p)
    for i in (3, 0, -1):
        if -len(p) <= i < len(p):
            assert p[i] == wanted[i]
            assert states() == before


def test_a_swapped_in_bit_generator_is_kept() -> None:
    original, state = np.random.get_bit_generator(), np.random.get_state()
    swapped = np.random.PCG64(5)
    np.random.set_bit_generator(swapped)
    try:
        np.random.standard_normal()
        wanted = list(PIPELINES["map"])
        before = swapped.state
        for _ in range(2):
            for _ in PIPELINES["map"]:
                assert np.random.get_bit_generator() is swapped
                assert swapped.state == before
        assert list(PIPELINES["map"]) == wanted
    finally:
        np.random.set_bit_generator(original)
        np.random.set_state(state)
    assert list(PIPELINES["map"]) == wanted


def test_the_cached_gaussian_of_a_swapped_in_bit_generator_is_kept() -> None:
    original, state = np.random.get_bit_generator(), np.random.get_state()

    def two_normals(p: Pipeline | None) -> list[float]:
        np.random.set_bit_generator(np.random.PCG64(5))
        first = float(np.random.randn())
        if p is not None:
            list(p)
        return [first, float(np.random.randn()), float(np.random.randn())]

    try:
        assert two_normals(PIPELINES["map"]) == two_normals(None)
    finally:
        np.random.set_bit_generator(original)
        np.random.set_state(state)


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached Gaussians"])
@pytest.mark.parametrize("source", [range(3), from_iterable(range(3))], ids=["random access", "stream"])
@pytest.mark.parametrize("run", [list, next, lambda p: next(iter(p))], ids=["whole", "one", "abandoned"])
def test_a_pipeline_run_inside_a_user_function_disturbs_nothing(source: Any, cached: bool, run: Any) -> None:
    inner = pipe(range(4), map(draw), batch(2))

    def nesting(_: Any) -> tuple[Draw, Any, Draw]:
        before = draw()
        got = run(iter(inner)) if run is next else run(inner)
        return before, got, draw()

    def plain(_: Any) -> tuple[Draw, Draw]:
        return draw(), draw()

    fresh(cached)
    before = states()
    nested = list(pipe(source, map(nesting)))
    assert states() == before
    assert [(a, b) for a, _, b in nested] == list(pipe(source, map(plain)))
    assert all(got == nested[0][1] for _, got, _ in nested)


def test_an_element_of_another_pipeline_inside_a_user_function_disturbs_nothing() -> None:
    inner = pipe(range(4), map(draw))
    nested = list(pipe(range(3), map(lambda i: (draw(), inner[i], draw()))))
    assert [(a, b) for a, _, b in nested] == list(pipe(range(3), map(lambda _: (draw(), draw()))))
    assert [x for _, x, _ in nested] == list(inner)[:3]


@pytest.mark.parametrize("name", PIPELINES)
def test_abandoning_a_run_leaves_the_callers_generators_alone(name: str) -> None:
    fresh(cached=True)
    before = states()
    run = iter(PIPELINES[name])
    next(run)
    assert states() == before
    del run
    assert states() == before
    for _ in PIPELINES[name]:
        break
    assert states() == before


def test_two_interleaved_runs_draw_what_they_draw_alone() -> None:
    p, q = PIPELINES["windows between"], PIPELINES["dataset in batches"]
    wanted = list(p), list(q)
    fresh(cached=True)
    before = states()
    pairs = []
    runs = iter(p), iter(q)
    for a in runs[0]:
        pairs.append((a, next(runs[1])))
        assert states() == before
    assert ([a for a, _ in pairs], [b for _, b in pairs]) == wanted


def failing(x: Any) -> Draw:
    drawn = draw()
    if x == 2:
        raise ValueError("the user's own")
    return drawn


def failing_filter(x: Any) -> bool:
    return bool(failing(x))


def failing_items(x: Any) -> Iterator[Any]:
    yield draw()
    yield failing(x)


class FailingDataset(Drawing):
    def __getitem__(self, i: int) -> tuple[int, Draw]:
        return i, failing(i)


FAILING: dict[str, Callable[[], Pipeline]] = {
    "map": lambda: pipe(range(6), map(failing)),
    "stream": lambda: pipe(stream(), map(failing), batch(2)),
    "filter": lambda: pipe(range(6), filter(failing_filter)),
    "flat_map": lambda: pipe(range(6), flat_map(failing_items)),
    "dataset": lambda: pipe(FailingDataset(), batch(2)),
    "behind": lambda: pipe(stream(), shuffle_buffer(2), map(draw), shuffle_buffer(2), map(lambda _: failing(2))),
    "order": lambda: pipe(range(6), sample(lambda n: [failing(2)] * n)),
}


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached Gaussians"])
@pytest.mark.parametrize("name", FAILING)
def test_an_exception_in_user_code_leaves_the_callers_generators_alone(name: str, cached: bool) -> None:
    fresh(cached)
    before = states()
    with pytest.raises(ValueError, match="the user's own"):
        list(FAILING[name]())
    assert states() == before
    if name in ("map", "dataset"):
        with pytest.raises(ValueError, match="the user's own"):
            FAILING[name]()[2 if name == "map" else 1]
        assert states() == before


@pytest.mark.parametrize("source", [range(6), Drawing(), stream()], ids=["list", "dataset", "stream"])
def test_what_is_delivered_before_an_exception_is_what_a_run_without_it_delivers(source: Any) -> None:
    def drawing_pipeline(fault: Callable[[Any], Any]) -> Pipeline:
        return pipe(source, map(lambda x: (x, draw())), filter(lambda _: bool(draw())), map(fault))

    got: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        got.extend(drawing_pipeline(lambda x: x if "2" not in repr(x)[:4] else 1 // 0))
    assert got == list(drawing_pipeline(lambda x: x))[:2]


def test_building_a_pipeline_asking_its_length_and_explaining_it_draw_nothing() -> None:
    fresh(cached=True)
    before = states()
    for pipeline in PIPELINES.values():
        p = pipe(pipeline, map(draw))
        assert p.explain()
        assert repr(p)
        assert bool(p)
    assert states() == before


def test_a_function_that_takes_rng_draws_from_it_alone() -> None:
    def jitter(_: int, rng: np.random.Generator) -> float:
        return float(rng.random())

    p = pipe(range(50), map(jitter))
    fresh(cached=True)
    before = states()
    first = list(p)
    assert states() == before
    assert len(set(first)) == 50
    assert first == list(p) == [p[i] for i in range(50)]
    assert not set(first) & set(p.at_epoch(1))
    assert not set(first) & set(p.seeded(1))


def test_a_generator_kept_by_user_code_goes_on_alone() -> None:
    kept: list[np.random.Generator] = []

    def keeping(_: int, rng: np.random.Generator) -> float:
        kept.append(rng)
        return float(rng.random())

    list(pipe(range(3), map(keeping)))
    assert len({float(g.random()) for g in kept}) == 3


@pytest.mark.parametrize("kind", [list, dict])
def test_a_list_or_dict_whose_own_access_draws_is_seeded_like_any_dataset(kind: type[Any]) -> None:
    class Noisy(kind):  # type: ignore[misc]
        def __getitem__(self, key: Any) -> Draw:
            return draw()

    p = pipe(from_map(Noisy([(0, "a"), (1, "b")])))
    fresh(cached=True)
    before = states()
    first = list(p)
    assert states() == before
    draw()
    assert list(p) == first
