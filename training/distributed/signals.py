"""SIGTERM, SIGINT, SIGHUP: save after the step that is under way, and leave; a later one ends the process at once.

So does one of `preemption_signals`, by which a cluster says that it is about to take the machines away; a later one
changes nothing, and Slurm is asked to start the job again.

A launcher passes a signal on by others (Ctrl-C arrives as SIGINT and, from the launcher, as SIGTERM), so whatever comes
within SAME_REQUEST of the first is the same request. The kernel drops it and ends the process by a later one, so it
does not matter for how long Python comes to no signal. The ranks hear of a request at different steps;
`StopRequest.agreed` lets them stop after the same one, for one sum over the ranks a step. A launcher that is gone is a
request too (`training.distributed.processes`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType

import torch
from deepspeed.accelerator import get_accelerator

from common import early_signals
from common.early_signals import REQUESTS
from training.distributed.processes import LAUNCHER_GONE, print_to_stderr

SAME_REQUEST = 5.0  # seconds


class StopRequest:
    """Remembers a signal until the loop asks.

    Args:
        preemption: names of the signals by which a cluster takes the machines away.

    Attributes:
        signal: the signal's number; None as long as nobody wants to stop.
        preempted: whether one of `preemption` received.
    """

    def __init__(self, preemption: Sequence[str] = ()) -> None:
        self.signal: int | None = None
        self.preempted = False
        signal.setitimer(signal.ITIMER_REAL, 0)  # that of a run before in this process
        preempts = [signal.Signals[name] for name in preemption]
        self._requests = [number for number in REQUESTS if number not in preempts]
        for number in (*self._requests, LAUNCHER_GONE):
            signal.signal(number, self._take)
        for number in preempts:
            signal.signal(number, self._take_preemption)
            if number in early_signals.received:
                self._take_preemption(number, None)
        early_signals.received.clear()  # a later run in this process has its own

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that the signal ended."""
        return 128 + (self.signal or 0)

    def agreed(self, other: bool) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether `other` holds on any rank; the same on all of them."""
        device = get_accelerator().current_device_name()
        asked = torch.zeros(3, device=device)
        # Made there, as the host would wait for a copy.
        asked[0], asked[1], asked[2] = self.signal or 0, other, self.preempted
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        number, anybody, preempted = asked.tolist()
        self.preempted = bool(preempted)
        if number:
            self.signal = int(number)
        if number == LAUNCHER_GONE and torch.distributed.get_rank() == 0:  # whichever rank saw it first
            print_to_stderr("error: the launcher is gone; the run saves and ends")
        return bool(number), bool(anybody)

    def _take_preemption(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.preempted = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self._answer_by(signal.SIG_IGN)
        signal.signal(signal.SIGALRM, lambda *_: self._answer_by(signal.SIG_DFL))
        signal.setitimer(signal.ITIMER_REAL, SAME_REQUEST)

    def _answer_by(self, action: signal.Handlers) -> None:
        for number in self._requests:
            signal.signal(number, action)
