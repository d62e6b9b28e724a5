"""Measure the parts of a step: data, forward and backward, optimizer, checkpoint.

Parts may be nested (the pipeline engine fetches data and steps the optimizer inside its schedule). Time counts for the
innermost part, so the parts never add up to more than the step. On a GPU nothing waits for kernels: work queued in one
part counts for the part that first needs its result. Cost: two clock readings per part, under a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

PARTS = ("data", "forward_backward", "optimizer", "checkpoint")

Item = TypeVar("Item")


class Timings:
    """A stopwatch with one hand for each of `PARTS`: `with timings("data"): ...`, then `timings.take()`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the time of the block for `part`."""
        self._switch()
        self._open.append(part)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def each(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, and count the time it takes to make them for `part`."""
        iterator = iter(items)
        while True:
            with self(part):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def take(self) -> dict[str, float]:
        """Return and reset the seconds of each part; call it outside all parts."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost part."""
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now
