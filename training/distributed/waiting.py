"""Waiting for what was begun with other ranks: in a file of its own, by which a rank that stands here is known to wait.

`Work.wait` is no Python, so a stack or traceback ends where it is called, as if that place itself hung or failed
(`training.distributed.rank_monitor`).
"""

from __future__ import annotations

from torch.distributed import Work


def wait(work: Work | None) -> None:
    """Until a message or a sum is done; on a GPU the device waits."""
    if work:
        work.wait()
