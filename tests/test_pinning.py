"""`pin`: tensors and custom types in any structure where there is an accelerator, else the same object."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from pipes import batch, collate, map, pin, pinning, pipe, take


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Box:
    inside: Any
    label: str


class Custom:
    """A type with its own idea of pinning, as in PyTorch."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned

    def pin_memory(self) -> Custom:
        return Custom(pinned=True)


class PinnedList(list[Any]):
    def pin_memory(self) -> str:
        return "its own way"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    pinning._can_pin.cache_clear()
    yield
    pinning._can_pin.cache_clear()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Pretend that there is one; what is pinned is the negative, and listed."""
    asked: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        asked.append(tensor)
        return -tensor

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return asked


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def pinned(x: Any) -> Any:
    return next(pin()([x]))


ONE = torch.tensor(1)


@pytest.mark.parametrize(
    ("structure", "wanted"),
    [
        (ONE, -1),
        ([ONE, 2], [-1, 2]),
        ((ONE, "a"), (-1, "a")),
        ({"x": ONE, "y": {"z": [ONE]}}, {"x": -1, "y": {"z": [-1]}}),
        (collections.OrderedDict(b=ONE, a=None), collections.OrderedDict(b=-1, a=None)),
        (collections.defaultdict[str, Any](int, a=ONE), collections.defaultdict[str, Any](int, a=-1)),
        (Point(ONE, b"y"), Point(-1, b"y")),
        (Box((ONE, [ONE]), "box"), Box((-1, [-1]), "box")),
        ([], []),
        ((), ()),
        ("text", "text"),
        (None, None),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("accelerator")
def test_every_tensor_is_pinned_and_the_structure_kept(structure: Any, wanted: Any) -> None:
    out = pinned(structure)
    assert type(out) is type(wanted) or isinstance(out, torch.Tensor)
    assert out == wanted
    if isinstance(wanted, collections.defaultdict):
        assert out.default_factory is wanted.default_factory


def test_each_tensor_is_pinned_once(accelerator: list[torch.Tensor]) -> None:
    pinned({"a": [ONE, ONE + 1], "b": (ONE + 2,)})
    assert [int(t) for t in accelerator] == [1, 2, 3]


@pytest.mark.usefixtures("accelerator")
def test_custom_types_pin_themselves_at_any_depth() -> None:
    assert pinned(Custom()).pinned
    assert pinned([{"x": (Custom(),)}])[0]["x"][0].pinned
    assert pinned([PinnedList([ONE])]) == ["its own way"]


@pytest.mark.usefixtures("accelerator")
def test_pinning_changes_nothing_in_its_input() -> None:
    given: dict[str, Any] = {"x": [ONE, 2]}
    pinned(given)
    assert given == {"x": [ONE, 2]}
    assert given["x"][0] is ONE


@pytest.mark.usefixtures("accelerator")
def test_a_class_among_the_data_is_no_custom_type() -> None:
    assert pinned([Custom, torch.Tensor]) == [Custom, torch.Tensor]


@pytest.mark.usefixtures("accelerator")
def test_pin_keeps_length_and_random_access_of_one_to_one_stages() -> None:
    p = pipe(range(6), batch(2), collate(), pin(), map(lambda t: t * 10))
    assert [t.tolist() for t in p] == [[0, -10], [-20, -30], [-40, -50]]
    assert len(p) == 3
    assert p[2].tolist() == [-40, -50]
    assert p[-1].tolist() == [-40, -50]
    assert [t.tolist() for t in pipe(p, take(1))] == [[0, -10]]


@pytest.mark.usefixtures("no_accelerator")
def test_without_an_accelerator_the_same_object_is_passed_on_and_one_warning_given() -> None:
    given = [{"x": torch.ones(2)}, Custom(), object(), None]
    with pytest.warns(UserWarning, match=r"pin\(\) found no accelerator and passes its data through") as caught:
        out = list(pin()(given))
    assert len(caught) == 1
    assert all(a is b for a, b in zip(out, given, strict=True))
    with warnings.catch_warnings(action="error"):
        assert next(iter(pipe(given, pin()))) is given[0]
        assert pipe(given, pin())[1] is given[1]


@pytest.mark.usefixtures("no_accelerator")
def test_describing_a_pipeline_that_pins_warns_of_nothing() -> None:
    with warnings.catch_warnings(action="error"):
        p = pipe([1], pin())
        assert repr(p).endswith("pin())")
        assert len(p) == 1
        assert "pin()" in p.explain()
