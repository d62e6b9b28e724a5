"""Handle signals while a process still imports, which takes seconds.

An entry point imports this first. A request to stop prints a line and ends the process at once, as nothing is trained
yet. Only the config says whether another signal announces a preemption: until then it is remembered, and the run leaves
before its first step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from common.phases import speaks_for_all

# Signals that ask a run to save and leave; a terminal that closes sends SIGHUP.
REQUESTS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup has it
    REQUESTS.remove(signal.SIGHUP)
PREEMPTION = ("SIGUSR1", "SIGUSR2")  # the usual ones of `preemption_signals`
ALL = (*REQUESTS, *(signal.Signals[name] for name in PREEMPTION))

started_by = os.getppid()  # before the imports: a process whose launcher dies gets another parent
received: list[int] = []  # remembered signals, the first one first


def note(preemption: Iterable[str] = PREEMPTION) -> None:
    """Leave at a request from now on, and remember the signals of `preemption`; restore the defaults of others."""
    wanted = [signal.Signals[name] for name in preemption]
    give_back(signal.Signals[name] for name in PREEMPTION if name not in preemption)
    for number in (*REQUESTS, *wanted):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _note if number in wanted else _leave)


def give_back(numbers: Iterable[int] = ALL) -> None:
    """Restore the default handlers; raise a signal again that was remembered before."""
    for number in numbers:
        if signal.getsignal(number) in (_note, _leave):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            if number in received:
                signal.raise_signal(number)


@contextmanager
def left_to_kernel() -> Iterator[None]:
    """Let the kernel end this process at a request: while it waits inside of a library, Python calls no handler."""
    numbers = [number for number in REQUESTS if signal.getsignal(number) == _leave and not received]
    try:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number in numbers:
            signal.signal(number, _leave)


def leave(number: int) -> NoReturn:
    """Exit as if the signal had ended the process; rank 0 says that nothing was trained."""
    if speaks_for_all():
        with suppress(OSError):
            line = "stopped before step 1 of this start: this start trained nothing; the same command goes on"
            print(line, flush=True)
    os._exit(128 + number)


def _note(number: int, frame: FrameType | None) -> None:
    received.append(number)


def _leave(number: int, frame: FrameType | None) -> None:
    if not received:  # else the run is about to leave, and has Slurm start it again
        leave(number)
