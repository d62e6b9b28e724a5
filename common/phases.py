"""Say on rank 0 what a start is doing until its first step; a process that enters no first phase prints nothing."""

from __future__ import annotations

import os
import time

from common.quantities import duration

_begun = 0.0


def speaks_for_all() -> bool:
    """Return whether this process is rank 0, or belongs to no launcher."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def enter(phase: str, first: bool = False) -> None:
    """Print a phase, with the time since the first one began."""
    global _begun  # noqa: PLW0603  # a process starts once
    now = time.monotonic()
    after = "" if first else f", after {duration(now - _begun)}"
    _begun = now if first else _begun
    if _begun and speaks_for_all():
        print(f"start: {phase}{after}", flush=True)
