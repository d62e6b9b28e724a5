"""Wait for a message or a sum with other ranks.

`Work.wait` is no Python, so a stack or traceback ends where it is called, as if that place itself hung or failed. In a
file of its own, the failure detector recognizes a waiting rank by its stack (`training.distributed.rank_monitor`).
"""

from __future__ import annotations

from torch.distributed import Work


def wait(work: Work | None) -> None:
    """Block until a message or a sum is done; on a GPU the device waits, not the host."""
    if work:
        work.wait()
