"""The strategies of our own tests: those we give to users, and what only we need."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from pipes.testing import pipelines, stages
from pipes.testing.strategies import sources

__all__ = ["Awkward", "elements", "pipelines", "sources", "stages"]


class Awkward:
    """An element whose `==` raises, as that of a multi-element array does when it is asked for a truth value."""

    def __init__(self, name: int) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    def __hash__(self) -> int:
        return self.name

    def __repr__(self) -> str:
        return f"Awkward({self.name})"


def elements(*, at_most: int = 9) -> st.SearchStrategy[list[object]]:
    """Draw lists of different elements, `None` and NaN among them."""
    one = st.one_of(st.integers(), st.none(), st.just(math.nan), st.text(max_size=3), st.tuples(st.booleans()))
    return st.lists(one, max_size=at_most, unique_by=repr)
