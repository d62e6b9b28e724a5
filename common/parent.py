"""A child process that ends with its parent, however the parent ends. Costs one system call."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_DEATH_SIGNAL = 1  # Linux's PR_SET_PDEATHSIG


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process once the thread that started it has ended.

    Args:
        parent: the parent's process number, handed over by the parent: it may be dead already, and then `os.getppid`
            gives somebody else's.
    """
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
