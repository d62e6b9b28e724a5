"""A progress bar in bytes: how much of a checkpoint has gone through, and how fast."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


@contextmanager
def byte_bar(what: str, total: int, shown: bool = True) -> Iterator[tqdm[NoReturn]]:
    """A bar that counts to `total` bytes, with its rate and warnings above it; in a log one line at the end."""
    bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, smoothing=0.05, disable=None if shown else True)
    begin = time.monotonic()
    with logging_redirect_tqdm(), bar:
        yield bar
    if shown and bar.disable:
        size = tqdm.format_sizeof(total, "B")
        print(f"{what}: {size} in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
