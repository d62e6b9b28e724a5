"""A progress bar in bytes: how much of a checkpoint has gone through, and how fast."""

from __future__ import annotations

from typing import NoReturn

from tqdm import tqdm


def byte_bar(what: str, total: int) -> tqdm[NoReturn]:
    """A bar that counts to `total` bytes and shows the rate in MB/s or GB/s."""
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, smoothing=0.05)
