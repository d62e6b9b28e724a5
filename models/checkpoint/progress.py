"""Progress bars: in bytes, how much of a checkpoint has gone through, and how fast; or in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


@contextmanager
def byte_bar(what: str, total: int, shown: bool = True) -> Iterator[tqdm[NoReturn]]:
    """A bar that counts to `total` bytes and shows the rate in MB/s or GB/s; warnings are printed above it."""
    bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, smoothing=0.05, disable=not shown)
    with logging_redirect_tqdm(), bar:
        yield bar


@contextmanager
def step_bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar that counts steps of unknown length; what it gives is called with a step's name when that begins."""
    with tqdm(desc=what, total=total, bar_format="{desc}: {n_fmt}/{total_fmt}{postfix} [{elapsed}]") as bar:

        def begin(name: str) -> None:
            bar.update()
            bar.set_postfix_str(name)

        yield begin
