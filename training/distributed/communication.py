"""Wait for messages, and make process groups among their members alone.

`Work.wait` is not Python, so the stack of a waiting rank ends at its caller: `wait` stands in this file, by which the
failure detector recognizes a rank that waits (`training.distributed.rank_monitor`).

DeepSpeed makes every group of the grid in every process: 592 for [16, 32], of which a process is in four. torch counts
the others and goes on. But DeepSpeed binds each process of a run on GPUs to its GPU, and NCCL then splits each group
off the communicator of all (ncclCommSplit), in which all processes take part, group by group. While nothing is bound,
the members of a group make its communicator themselves, at its first use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed import Work


def wait(work: Work | None) -> None:
    """Block until the work is done; on a GPU the device waits, not the host."""
    if work:
        work.wait()


@contextmanager
def among_members() -> Iterator[None]:
    """Make groups without other processes; every process still makes all groups in the same order."""
    world = torch.distributed.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def wait_until(reached: Callable[[], bool]) -> None:
    """Block until another process of this host has done something, which `reached` reads in shared memory.

    Looks every 50 microseconds at first, then every millisecond: less than a micro-batch takes.
    """
    pause = 5e-5
    while not reached():
        time.sleep(pause)
        pause = min(1e-3, 1.2 * pause)
