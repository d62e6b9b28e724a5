"""End a child process with its parent, however the parent ends. Costs one system call."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

PARENT_DEATH_SIGNAL = 1  # Linux's PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)  # loaded here, as a child that is forked beside threads had better load nothing


def end_with_this_process(ignored: Iterable[int] = ()) -> Callable[[], None]:
    """Make a `preexec_fn` for subprocess that ends the child with this process.

    Args:
        ignored: signals that the child ignores, from its first moment on.
    """
    return partial(_prepare, os.getpid(), tuple(ignored))


def _prepare(parent: int, ignored: tuple[int, ...]) -> None:
    end_with_parent(parent)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def without_sigterm() -> Iterator[None]:
    """Defer SIGTERM while a child is forked: an exception of its handler would be lost in the hooks of the fork.

    To block it is not enough: another thread gets it then, and Python runs the handler in this one.
    """
    received: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        if received:
            signal.raise_signal(signal.SIGTERM)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process once the thread that started it has ended.

    Args:
        parent: the parent's process number, handed over by the parent: it may be dead already, and then `os.getppid`
            gives somebody else's.
    """
    _libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
