"""What a test lets happen to a process: the system gives it too little, or it is killed in the middle of its work."""

from __future__ import annotations

import itertools
import os
import pkgutil
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Let the system give this process at most so much of something (`resource.RLIMIT_*`)."""
    limits = resource.getrlimit(what)
    resource.setrlimit(what, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, limits)


def killed_at(call: str, number: int, work: Callable[[], object]) -> int:
    """Do some work in a child that is killed when it calls something for the `number`th time; gives the signal."""
    child = os.fork()
    if child == 0:
        try:
            owner, _, name = call.rpartition(".")
            original, calls = pkgutil.resolve_name(call), itertools.count(1)

            def counted(*arguments: object, **options: object) -> object:
                if next(calls) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            setattr(pkgutil.resolve_name(owner), name, counted)
            work()
        finally:
            os._exit(1)  # the child must never become a second test run
    return os.WTERMSIG(os.waitpid(child, 0)[1])
