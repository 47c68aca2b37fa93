"""The generators that an epoch's order and its workers' seeds come from, as a state that goes through JSON.

Laws: what is drawn inside `as_then` is what was drawn behind `states`; after it the program's global generators are
what they were, and generators that the user made have moved on as they did then.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from pipes.isolation import isolated


def states(loader: Any) -> dict[str, Any]:
    """Return the states that an order may depend on.

    Those of torch's generator and of those given to the loader and its sampler, and where a sampler is not torch's own,
    of `random` and NumPy.
    """
    found: dict[str, Any] = {"torch": _text(torch.default_generator)}
    found |= {name: _text(generator) for name, generator in _given(loader).items()}
    if not is_torchs(loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        version, words, gaussian = random.getstate()
        found |= {"random": [version, list(words), gaussian]}
        found |= {"numpy": _of_numpy(np.random.get_state(legacy=False))}  # noqa: NPY002  # the one that samplers use
    return found


def is_torchs(*samplers: Any) -> bool:
    """Whether samplers are of torch's own classes, which draw from torch's generators alone and hold no state."""
    return all(sampler is None or type(sampler).__module__.startswith("torch.utils.data") for sampler in samplers)


def restore(loader: Any, saved: dict[str, Any]) -> None:
    """Give the generators the states that they had."""
    torch.default_generator.set_state(_bits(saved["torch"]))
    for name, generator in _given(loader).items():
        if name in saved:
            generator.set_state(_bits(saved[name]))
    if "random" in saved:
        version, words, gaussian = saved["random"]
        random.setstate((version, tuple(words), gaussian))
        np.random.set_state(_to_numpy(saved["numpy"]))  # noqa: NPY002  # the same


@contextmanager
def as_then(loader: Any, saved: dict[str, Any]) -> Iterator[None]:
    """Draw in a `with` block what was drawn then; the global generators stay as they are, the user's own move on."""
    with isolated(0):
        restore(loader, saved)
        yield


def _given(loader: Any) -> dict[str, torch.Generator]:
    inner = getattr(loader.batch_sampler, "sampler", None)
    holders = {"loader": loader, "sampler": loader.sampler, "batch_sampler": loader.batch_sampler, "in it": inner}
    found = {name: getattr(holder, "generator", None) for name, holder in holders.items()}
    return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}


def _text(generator: torch.Generator) -> str:
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def _bits(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _of_numpy(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _of_numpy(v) for k, v in x.items()}
    return x.tolist() if isinstance(x, np.ndarray) else x


def _to_numpy(x: Any) -> Any:
    return {**x, "state": {k: np.array(v, np.uint32) if isinstance(v, list) else v for k, v in x["state"].items()}}
