"""Say how far a search for plans is once it takes longer than `PATIENCE`: a bar on a terminal, lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PATIENCE, PAUSE = 2.0, 10.0  # seconds without a word at the beginning, and between two lines

Item = TypeVar("Item")


class _Shown:
    """What is shown of a search; its loops may lie in each other, and the innermost counts."""

    def __init__(self, log: Console) -> None:
        columns = TextColumn("searching"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
        self.bar = Progress(*columns, TimeElapsedColumn(), console=log, transient=True)
        self._log, self._task = log, self.bar.add_task("")
        self._due = time.monotonic() + PATIENCE

    def show(self, done: int, total: int, what: str) -> None:
        """Show how much of a loop is done, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        if self._log.is_terminal:
            self.bar.update(self._task, description=what, completed=done, total=total)
            self.bar.start()
        else:
            self._log.print(f"searching: {done} of {total} {what}")
            self._due = now + PAUSE


_shown: ContextVar[_Shown | None] = ContextVar("shown", default=None)


@contextmanager
def searching(log: Console) -> Iterator[None]:
    """Show the progress of the loops over `each_of` inside."""
    shown = _Shown(log)
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)
        if log.is_terminal:  # elsewhere it would print an empty line
            shown.bar.stop()


def each_of(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items of a search, and show how many are done, if somebody wants to know.

    Args:
        what: they are, in the plural.
    """
    shown = _shown.get()
    for done, item in enumerate(items):
        if shown:
            shown.show(done, len(items), what)
        yield item
