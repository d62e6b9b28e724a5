"""A progress bar in bytes: how much of a checkpoint has gone through, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
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
