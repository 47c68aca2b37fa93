"""`collate`: torch's `default_collate` where that works, tuples kept, and an error wherever samples differ."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils.data import default_collate

from pipes import (
    batch,
    collate,
    from_arrays,
    from_map,
    map,
    pipe,
    register_collate,
    repeat,
    sample,
    shard_by_rank,
    shuffle_buffer,
    shuffled,
    skip,
    subset,
    take,
)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Box:
    low: Any
    high: Any


def collated(samples: Any, **options: Any) -> Any:
    return next(collate(**options)([samples]))


def assert_same(ours: Any, theirs: Any, *, lists_for_tuples: bool = False) -> None:
    """Equal in structure, types, dtypes and values; torch gives a list where a sample has a tuple."""
    if lists_for_tuples:  # and a tuple for a column of strings
        ours, theirs = (list(x) if type(x) is tuple else x for x in (ours, theirs))
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(theirs))
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key], lists_for_tuples=lists_for_tuples)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b, lists_for_tuples=lists_for_tuples)
    elif dataclasses.is_dataclass(ours):
        assert_same(vars(ours), vars(theirs))
    else:
        assert ours == theirs


# -- against torch -----------------------------------------------------------------------------------------------------

TORCH_DTYPES = [
    np.dtype(d) for d in ("bool", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16", "u2", "u4", "u8")
]


@st.composite
def sample_makers(draw: st.DrawFn, depth: int = 3) -> st.SearchStrategy[Any]:
    """A strategy for samples of one structure, shape and dtype."""
    kinds = ["array", "tensor", "int", "bool", "float", "scalar", "str", "bytes"]
    kind = draw(st.sampled_from(kinds + (["dict", "ordered", "list", "tuple", "named"] * 2 if depth else [])))
    if kind in ("array", "tensor"):
        dtype = draw(st.sampled_from(TORCH_DTYPES))
        arrays = hnp.arrays(dtype, draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)))
        return arrays if kind == "array" else arrays.map(torch.tensor)
    if kind == "scalar":
        dtype = draw(st.sampled_from([d for d in TORCH_DTYPES if d.kind in "ifb" or d == np.uint8]))
        return hnp.arrays(dtype, (1,)).map(lambda a: a[0])
    leaves: dict[str, st.SearchStrategy[Any]] = {
        "int": st.integers(-(2**63), 2**63 - 1),
        "bool": st.booleans(),
        "float": st.floats(),
        "str": st.text(),
        "bytes": st.binary(),
    }
    if kind in leaves:
        return leaves[kind]
    parts = draw(st.lists(sample_makers(depth - 1), min_size=2 if kind == "named" else 0, max_size=2))
    if kind in ("dict", "ordered"):
        fixed = st.fixed_dictionaries({f"k{i}": part for i, part in enumerate(parts)})
        return fixed if kind == "dict" else fixed.map(collections.OrderedDict)
    together = st.tuples(*parts)
    return together.map(list) if kind == "list" else together.map(lambda t: Point(*t)) if kind == "named" else together


@given(st.data())
def test_collate_gives_what_torchs_default_collate_gives(data: st.DataObject) -> None:
    samples = data.draw(st.lists(data.draw(sample_makers()), min_size=1, max_size=4))
    assert_same(collated(samples), default_collate(samples), lists_for_tuples=True)


@given(st.data())
def test_the_numpy_target_holds_the_same_values_in_the_same_structure(data: st.DataObject) -> None:
    samples = data.draw(st.lists(data.draw(sample_makers()), min_size=1, max_size=4))

    def as_arrays(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.numpy()
        if isinstance(x, dict):
            return type(x)((k, as_arrays(v)) for k, v in x.items())
        if isinstance(x, tuple):
            return Point(*(as_arrays(v) for v in x)) if isinstance(x, Point) else tuple(as_arrays(v) for v in x)
        return [as_arrays(v) for v in x] if isinstance(x, list) else x

    assert_same(collated(samples, to="numpy"), as_arrays(collated(samples)))


@given(st.data())
def test_collating_changes_no_sample_and_shares_no_memory(data: st.DataObject) -> None:
    arrays = data.draw(st.lists(hnp.arrays(np.float32, (2, 3)), min_size=1, max_size=3))
    before = [a.copy() for a in arrays]
    for a in arrays:
        a.flags.writeable = False
    out = collated(arrays)
    assert out.numpy().flags.writeable
    out[:] = 7
    assert all(a.tobytes() == b.tobytes() for a, b in zip(arrays, before, strict=True))


@pytest.mark.parametrize(
    "samples",
    [
        [collections.defaultdict(int, a=1), collections.defaultdict(int, a=2)],
        [collections.OrderedDict(b=1, a=2)] * 2,
    ],
    ids=["defaultdict", "OrderedDict"],
)
def test_mappings_keep_their_type_as_in_torch(samples: list[Any]) -> None:
    ours, theirs = collated(samples), default_collate(samples)
    assert_same(ours, theirs)
    if isinstance(theirs, collections.defaultdict):
        assert ours.default_factory is theirs.default_factory


# -- leaves and structures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["torch", "numpy"])
@pytest.mark.parametrize("samples", [["a", ""], [b"a", b"b"], [None, None], [Path, len], [{1}, {2}]], ids=repr)
def test_text_none_and_unknown_objects_stay_a_list(samples: list[Any], to: str) -> None:
    class Anything:
        pass

    assert collated(samples, to=to) == samples
    things = [Anything(), Anything()]
    assert collated(things, to=to) == things
    assert collated([{"x": s} for s in things], to=to) == {"x": things}


@pytest.mark.parametrize(
    ("samples", "dtype"),
    [
        ([1, 2], "int64"),
        ([True, False], "bool"),
        ([1.5, 2.5], "float64"),
        ([1j], "complex128"),
        ([np.float32(1)], "float32"),
        ([np.float16(1)], "float16"),
        ([np.uint8(1), np.uint8(2)], "uint8"),
        ([np.bool_(True)], "bool"),
        ([1, np.int64(2)], "int64"),
        ([-(2**63), 2**63 - 1], "int64"),
        ([np.array(1, np.int16), np.array(2, np.int16)], "int16"),
        ([np.zeros((0, 3), np.float32)] * 2, "float32"),
    ],
    ids=repr,
)
def test_numbers_have_torchs_dtypes(samples: list[Any], dtype: str) -> None:
    assert collated(samples, to="numpy").dtype == dtype
    assert collated(samples).dtype == getattr(torch, dtype)
    assert len(collated(samples)) == len(samples)


def test_dataclasses_and_named_tuples_keep_their_type_nested() -> None:
    samples = [Box(Point(1, "a"), {"z": (np.zeros(2), [0.5])}), Box(Point(2, "b"), {"z": (np.ones(2), [1.5])})]
    out = collated(samples, to="numpy")
    z = np.array([[0.0, 0], [1, 1]]), [np.array([0.5, 1.5])]
    assert_same(out, Box(Point(np.array([1, 2]), ["a", "b"]), {"z": z}))


def test_memmaps_views_and_other_layouts_are_stacked_as_plain_arrays(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "data", np.int32, "w+", shape=(4, 3))
    array[:] = np.arange(12).reshape(4, 3)
    for samples in ([array[0], array[2]], [np.asfortranarray(array[:2])] * 2, [array[::-1, ::2]], [array.T]):
        out = collated(samples, to="numpy")
        assert_same(out, np.stack([np.asarray(s) for s in samples]))


@pytest.mark.parametrize("dtype", ["U3", "S2", "M8[s]", "m8[s]", "O", "i4,f8"])
def test_numpy_dtypes_that_torch_lacks_are_stacked_or_refused_by_name(dtype: str) -> None:
    samples = [np.zeros(2, dtype), np.zeros(2, dtype)]
    assert collated(samples, to="numpy").dtype == np.dtype(dtype)
    with pytest.raises(TypeError, match=r"torch has no dtype .* at \['x'\]; convert it in map, or pass to=\"numpy\""):
        collated([{"x": s} for s in samples])


def test_a_byte_order_that_torch_lacks_is_refused_by_name() -> None:
    samples = [np.zeros(2, ">i4")] * 2
    with pytest.raises(TypeError, match=r"torch has no dtype >i4; convert it in map"):
        collated(samples)


def test_tensor_dtypes_that_numpy_lacks_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"NumPy cannot hold a tensor of torch.bfloat16 at \[0\]"):
        collated([(torch.zeros(2, dtype=torch.bfloat16),)] * 2, to="numpy")
    with pytest.raises(TypeError, match=r"NumPy cannot hold .*grad"):
        collated([torch.zeros(2, requires_grad=True)] * 2, to="numpy")


def test_the_mask_of_a_masked_array_is_not_dropped_in_silence() -> None:
    samples = [np.ma.MaskedArray([1, 2], [True, False]), np.ma.MaskedArray([3, 4], [False, False])]
    try:
        out = collated(samples, to="numpy")
    except TypeError:
        return
    assert isinstance(out, np.ma.MaskedArray)
    assert out.mask.any()


# -- the registry and a function of one's own --------------------------------------------------------------------------


class Ragged(list[int]):
    pass


class MoreRagged(Ragged):
    pass


def test_the_registry_goes_first_for_a_class_and_its_subclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipes.collating._REGISTRY", {})
    assert_same(collated([Ragged([1])], to="numpy"), Ragged([np.array([1])]))  # type: ignore[list-item]
    register_collate(Ragged, lambda samples: [len(s) for s in samples])
    try:
        assert collated([{"x": Ragged([1, 2])}, {"x": MoreRagged([])}]) == {"x": [2, 0]}
        with pytest.raises(TypeError, match="got Ragged in sample 0 and list in sample 1"):
            collated([Ragged([1]), [1]])
    finally:
        from pipes import collating

        collating._kind.cache_clear()


def test_the_registry_result_is_converted_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipes.collating._REGISTRY", {})
    register_collate(Fraction, lambda samples: np.array([float(s) for s in samples]))
    try:
        assert_same(collated([Fraction(1, 2)]), torch.tensor([0.5], dtype=torch.float64))
    finally:
        from pipes import collating

        collating._kind.cache_clear()


def padded(samples: Sequence[Any]) -> npt.NDArray[np.float64]:
    out = np.zeros((len(samples), max(len(s) for s in samples)))
    for row, one in zip(out, samples, strict=True):
        row[: len(one)] = one
    return out


def test_a_function_of_ones_own_pads_and_its_result_is_passed_on_as_it_is() -> None:
    out = list(pipe([[1], [2, 3], []], batch(3), collate(padded)))
    assert_same(out[0], np.array([[1.0, 0], [2, 3], [0, 0]]))


def test_collate_keeps_random_access() -> None:
    p = pipe(range(10), batch(4), collate())
    assert len(p) == 3
    assert p[2].tolist() == [8, 9]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "kind", "words"),
    [
        ([{"x": 1}, {"x": 1, "y": 2}], ValueError, ["keys", "'y'", "sample 0", "sample 1"]),
        ([{"a": {"x": 1}}, {"a": {"x": 1}}, {"a": {}}], ValueError, ["keys at ['a']", "sample 2"]),
        ([(np.zeros(2),), (np.zeros(3),)], ValueError, ["shape at [0]", "(2,) in sample 0", "(3,) in sample 1", "pad"]),
        ([{"i": torch.zeros(2, 1)}, {"i": torch.zeros(2)}], ValueError, ["shape at ['i']", "(2, 1)", "(2,)"]),
        ([np.zeros((0, 2)), np.zeros((0, 3))], ValueError, ["shape", "(0, 2) in sample 0", "(0, 3) in sample 1"]),
        ([np.zeros(()), np.zeros(1)], ValueError, ["shape", "() in sample 0", "(1,) in sample 1"]),
        ([np.zeros(2), np.zeros(2, np.float32)], ValueError, ["dtype", "float64 in sample 0", "float32 in sample 1"]),
        ([torch.zeros(2), torch.zeros(2).int()], ValueError, ["dtype", "torch.float32", "torch.int32", "cast"]),
        ([1, 2.5], ValueError, ["dtype", "int64 in sample 0", "float64 in sample 1", "cast"]),
        ([1, True], ValueError, ["dtype", "int64 in sample 0", "bool in sample 1"]),
        ([False, 0], ValueError, ["dtype", "bool in sample 0", "int64 in sample 1"]),
        ([1, 2, 3, np.int32(4)], ValueError, ["dtype", "int64 in sample 0", "int32 in sample 3"]),
        ([[1, 2], [1, 2], [1]], ValueError, ["length", "2 in sample 0", "1 in sample 2"]),
        ([1, "a"], TypeError, ["type", "int in sample 0", "str in sample 1"]),
        ([Point(0, 1), Point(0, None)], TypeError, ["type at .y", "int in sample 0", "NoneType in sample 1"]),
        ([Box(0, [1]), Box(0, (1,)), Box(0, {})], TypeError, ["type at .high", "list in sample 0", "dict in sample 2"]),
        ([np.zeros(2), torch.zeros(2)], TypeError, ["type", "ndarray in sample 0", "Tensor in sample 1"]),
        ([np.zeros(2), [0, 0]], TypeError, ["type", "ndarray in sample 0", "list in sample 1"]),
        ([Point(0, 1), (0, 1)], TypeError, ["type", "Point in sample 0", "tuple in sample 1"]),
        ([{"x": [0, {"y": 1}]}, {"x": [0, {"y": "1"}]}], TypeError, ["['x'][1]['y']", "int in sample 0", "str"]),
        ([{"n": 2**63}], OverflowError, ["64 bits at ['n']"]),
        ([-(2**63) - 1], OverflowError, ["64 bits"]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("to", ["torch", "numpy"])
def test_samples_that_differ_are_an_error_with_path_sample_and_both(
    samples: list[Any], kind: type[Exception], words: list[str], to: str
) -> None:
    with pytest.raises(kind) as caught:
        list(pipe(samples, batch(len(samples)), collate(to=to)))
    for word in words:
        assert word in str(caught.value)
    assert "collate(" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("element", [{"x": 1}, "abc", 3, np.zeros(2)], ids=repr)
def test_collate_without_batch_before_it_says_so(element: Any) -> None:
    with pytest.raises(TypeError, match=r"collate needs a list of samples, got .*; put batch\(size\) before it"):
        list(pipe([element], collate()))


def test_an_empty_batch_cannot_be_collated() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        list(collate()([[]]))


# -- columns: no row is made, and nothing shows it ---------------------------------------------------------------------

N = 11
LEAF: dict[str, Callable[[], Any]] = {
    "floats": lambda: np.arange(N, dtype=np.float32),
    "rows": lambda: np.arange(N * 6, dtype=np.int16).reshape(N, 2, 3),
    "empty rows": lambda: np.zeros((N, 0)),
    "bools": lambda: np.arange(N) % 2 == 0,
    "fortran": lambda: np.asfortranarray(np.arange(N * 2.0).reshape(N, 2)),
    "tensor": lambda: torch.arange(N * 2.0).reshape(N, 2),
    "tensor of one dimension": lambda: torch.arange(N),
}
STAGES: dict[str, list[Any]] = {
    "none": [],
    "sample": [sample(shuffled())],
    "subset": [sample(subset([3, 3, 0]))],
    "take": [take(7)],
    "skip": [skip(4)],
    "window": [shuffle_buffer(4)],
    "repeat": [sample(shuffled()), repeat(3)],
    "endless": [sample(shuffled()), repeat(), take(30)],
    "shuffled repeat": [repeat(2), sample(shuffled())],
    "rank": [shard_by_rank(1, 2, uneven="pad")],
    "all": [sample(shuffled()), repeat(2), shuffle_buffer(5), skip(1), shard_by_rank(0, 2), take(8)],
}


def same_row(row: Any) -> Any:
    return row


def assert_columns_equal_rows(source: Any, stages: list[Any], to: str, drop_last: bool = False) -> None:
    end = [batch(4, drop_last=drop_last), collate(to=to)]
    columns, rows = pipe(source, *stages, *end), pipe(source, *stages, map(same_row), *end)
    assert len(columns) == len(rows)
    by_column, by_row = list(columns), list(rows)
    for a, b in zip(by_column, by_row, strict=True):
        assert_same(a, b)
    if by_column:
        assert_same(columns[-1], by_column[-1])


@pytest.mark.parametrize("to", ["torch", "numpy"])
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_columns_give_exactly_what_rows_give_behind_any_order(stages: list[Any], to: str) -> None:
    x, y, t = LEAF["rows"](), LEAF["floats"](), LEAF["tensor"]()
    for source in (from_arrays(x, y, t), from_arrays({"x": x, "t": t}), from_arrays(x), from_map(x), from_map(y)):
        for drop_last in (False, True):
            assert_columns_equal_rows(source, stages, to, drop_last)


@pytest.mark.parametrize("to", ["torch", "numpy"])
@pytest.mark.parametrize("leaf", LEAF)
def test_columns_of_any_kind_give_exactly_what_rows_give(leaf: str, to: str) -> None:
    column = LEAF[leaf]()
    assert_columns_equal_rows(from_arrays(column, column), [sample(shuffled())], to)
    assert_columns_equal_rows(from_arrays({"x": column}), [], to)
    if isinstance(column, np.ndarray):
        assert_columns_equal_rows(from_map(column), [shuffle_buffer(3)], to)


@pytest.mark.parametrize("dtype", ["U3", "S2", "M8[s]", "m8[s]", "O", "i4,f8", ">i4", ">f8"])
@pytest.mark.parametrize("shape", [(N,), (N, 2)], ids=["1-d", "2-d"])
@pytest.mark.parametrize("bare", [True, False], ids=["from_map", "from_arrays"])
def test_columns_of_dtypes_that_torch_lacks_give_exactly_what_rows_give(
    dtype: str, shape: tuple[int, ...], bare: bool
) -> None:
    column = np.zeros(shape, dtype)
    assert_columns_equal_rows(from_map(column) if bare else from_arrays(column), [], "numpy")


def test_columns_from_a_memmap_give_plain_arrays(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "data", np.int32, "w+", shape=(N, 3))
    array[:] = np.arange(N * 3).reshape(N, 3)
    array.flush()
    for source in (from_map(array), from_arrays(array, array)):
        for stages in STAGES.values():
            assert_columns_equal_rows(source, stages, "numpy")
    read_only = np.memmap(tmp_path / "data", np.int32, "r", shape=(N, 3))
    assert_columns_equal_rows(from_map(read_only), [sample(shuffled())], "torch")


@pytest.mark.parametrize("to", ["torch", "numpy"])
def test_a_batch_of_columns_is_private_to_its_receiver(to: str) -> None:
    x, t = np.zeros((N, 2)), torch.zeros(N, 2)
    for out in pipe(from_arrays(x, t), batch(4), collate(to=to)):
        out[0][:] = 1
        out[1][:] = 1
    assert not x.any()
    assert not t.any()


def test_a_function_of_ones_own_gets_rows_also_from_columns() -> None:
    seen: list[Any] = []
    list(pipe(from_arrays(np.arange(4), np.arange(4)), batch(2), collate(seen.append)))
    assert seen == [[(0, 0), (1, 1)], [(2, 2), (3, 3)]]


def test_a_registered_type_is_looked_up_in_rows_and_columns_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipes import collating

    monkeypatch.setattr("pipes.collating._REGISTRY", {})
    register_collate(np.ndarray, lambda samples: np.stack(samples) + 1)
    try:
        assert_columns_equal_rows(from_arrays(np.zeros((N, 2))), [], "numpy")
    finally:
        collating._kind.cache_clear()
