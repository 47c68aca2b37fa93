"""Where the user of a `DataLoader` stands, and the state that it is saved as.

Laws: it tells what was received, never what was loaded ahead; a state is refused by a loader of other data, of another
sampler or batch size, and by another number of workers where workers have places of their own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from pipes.context import Cursor
from pipes.drop_in import generators
from pipes.drop_in.indices import drawn_from
from pipes.drop_in.replicas import is_stateful

VERSION = 1


@dataclass
class Progress:
    """Where the user stands, apart from the iterator: a loop that was left by `break` must not keep workers alive."""

    running: bool = False
    first: bool = True  # the epoch that the base seed was drawn in: persistent workers keep theirs
    batches: int = 0
    cursor: Cursor = None
    base_seed: int | None = None
    generators: dict[str, Any] | None = None
    datasets: list[Any] = field(default_factory=list)

    def saved(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the state: it holds the generators as the epoch found them, and between two epochs as they are."""
        state = {"version": VERSION, "of": _described(loader), "num_workers": loader.num_workers, **vars(self)}
        sampler, *_ = drawn_from(loader)
        state["sampler"] = sampler.state_dict() if is_stateful(sampler) and not self.running else None
        if not self.running:
            state["generators"] = generators.states(loader)
        return copy.deepcopy(state)

    @classmethod
    def loaded(cls, state: dict[str, Any]) -> Progress:
        """Return what a state holds."""
        return cls(**{f.name: state[f.name] for f in fields(cls)})


def _described(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a loader must share with the one that its state is of."""
    sampler = type(loader._index_sampler if loader.batch_size is None else loader.sampler).__name__
    length = len(loader.dataset) if hasattr(loader.dataset, "__len__") and not is_iterable(loader) else None
    data = {"dataset": type(loader.dataset).__qualname__, "length": length, "sampler": sampler}
    return data | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Whether the data set is iterable-style."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


def check(loader: DataLoader[Any], state: Any) -> None:
    """Refuse a state that is not of such a loader."""
    keys = Progress().saved(loader).keys()
    if not isinstance(state, dict) or not keys <= state.keys():
        missing = sorted(keys - state.keys()) if isinstance(state, dict) else f"a {type(state).__name__}"
        raise ValueError(f"a state must be what state_dict() returned, got one that is corrupt or cut short: {missing}")
    if state["version"] != VERSION:
        raise ValueError(f"a state must be of version {VERSION}, got {state['version']!r}")
    for what, ours in _described(loader).items():
        if (theirs := state["of"].get(what)) != ours:
            raise ValueError(
                f"a state must be loaded into a loader as it was saved from: {what} {ours!r}, got {theirs!r}"
            )
    bound = (is_iterable(loader) and state["running"]) or any(s is not None for s in state["datasets"])
    if bound and state["num_workers"] != loader.num_workers:
        raise ValueError(
            f"each worker of an iterable-style data set, or of one with a state, has a place of its own in it: "
            f"`num_workers` must be {state['num_workers']}, as it was, got {loader.num_workers}"
        )
