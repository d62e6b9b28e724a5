"""End a child process with its parent, however the parent ends. Costs one system call."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

PARENT_DEATH_SIGNAL = 1  # Linux's PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)  # loaded here, as a child that is forked beside threads had better load nothing


def end_with_this_process() -> Callable[[], None]:
    """Make a `preexec_fn` for subprocess that ends the child with this process."""
    return partial(end_with_parent, os.getpid())


@contextmanager
def without_sigterm() -> Iterator[None]:
    """Block SIGTERM while a child is forked: an exception of its handler would be lost in the hooks of the fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process once the thread that started it has ended.

    Args:
        parent: the parent's process number, handed over by the parent: it may be dead already, and then `os.getppid`
            gives somebody else's.
    """
    _libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see `without_sigterm`
    if os.getppid() != parent:
        os._exit(1)
