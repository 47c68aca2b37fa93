"""The indices of an epoch, drawn from a sampler by the consumer.

Laws: they are drawn in torch's order and no further ahead; each comes with the sampler's state behind it, so that a
state is that of what was received; an exception of the sampler is raised behind everything that was drawn before it.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from pipes.context import Cursor, Pair
from pipes.drop_in.replicas import ENDED, is_stateful, next_of, taken


def drawn_from(loader: DataLoader[Any]) -> tuple[Any, int | None, bool]:
    """Return what gives the indices, and how they are batched here: what torch's `BatchSampler` does we do ourselves.

    So the states of the sampler in it, and of that one's iterator, are within reach.
    """
    batched: Any = loader.batch_sampler
    if type(batched) is BatchSampler:
        return batched.sampler, batched.batch_size, batched.drop_last
    return (loader.sampler if batched is None else batched), None, False


class Drawn:
    """The indices of an epoch, some of them drawn ahead, each with the number and the sampler's states behind it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._sampler, self._size, self._drop_last = drawn_from(loader)
        self._ahead: deque[Pair] = deque()
        self._rest: Iterator[Pair] = iter(())
        self._failure: Exception | None = None

    def beginning(self) -> Cursor:
        """Return the place before the first index of an epoch that begins now, where the sampler has a state."""
        return (0, copy.deepcopy(self._sampler.state_dict()), None, False) if is_stateful(self._sampler) else None

    def start(self, items: Iterator[Any], upstream: Cursor, ahead: int) -> None:
        """Begin an epoch behind what was received, and draw some indices ahead: now, as torch does."""
        self._ahead, self._rest, self._failure = deque(), self._drawn(items, upstream), None
        try:
            self._ahead.extend(itertools.islice(self._rest, ahead))
        except Exception as error:  # noqa: BLE001  # raised behind what was drawn before it
            self._failure = error

    def pairs(self, _: Cursor) -> Iterator[Pair]:
        """Yield indices from where `start` began."""
        while self._ahead:
            yield self._ahead.popleft()
        if self._failure is not None:
            raise self._failure
        yield from self._rest

    def _drawn(self, items: Any, upstream: Cursor) -> Iterator[Pair]:
        given, of_sampler, of_items, over = upstream or (0, None, None, False)
        if of_sampler is not None:
            self._sampler.load_state_dict(copy.deepcopy(of_sampler))
        if over:  # asked again the sampler might begin its next epoch
            return
        if self._size is not None or of_sampler is not None:
            items = iter(self._sampler)  # asked only now, as torch's BatchSampler does
        if of_items is not None:
            items.load_state_dict(copy.deepcopy(of_items))
        if of_sampler is None and of_items is None:
            for _ in range(given):
                taken(items, self._size or 1)
        while not over and (index := next_of(items, self._size, drop_last=self._drop_last)) is not ENDED:
            given += 1
            over = self._size is not None and len(index) < self._size
            states = (copy.deepcopy(x.state_dict()) if is_stateful(x) else None for x in (self._sampler, items))
            yield index, (given, *states, over)
