"""Wait for a message or an all-reduce, in a file of its own by which the failure detector recognizes a waiting rank.

`Work.wait` is not Python, so the stack of a waiting rank ends at its caller (`training.distributed.rank_monitor`).
"""

from __future__ import annotations

from torch.distributed import Work


def wait(work: Work | None) -> None:
    """Block until the work is done; on a GPU the device waits, not the host."""
    if work:
        work.wait()
