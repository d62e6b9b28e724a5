"""Stop requests: SIGTERM, SIGINT or SIGHUP saves after the current step and ends the run; a later one ends it at once.

A signal of `preemption_signals`, which a cluster sends before it takes the machines away, does the same, asks Slurm to
requeue the job, and may be repeated. A launcher that is gone is a request too.

Launchers pass a signal on as other ones (Ctrl-C arrives as SIGINT and, from the launcher, as SIGTERM), so signals
within SAME_REQUEST of the first belong to the same request. The kernel ignores them, and ends the process by later
ones, however long Python takes to handle a signal. Ranks receive a request at different steps; `StopRequest.agreed`,
one all-reduce a step, lets them stop after the same one.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType

import torch
from deepspeed.accelerator import get_accelerator

from common import early_signals
from common.early_signals import REQUESTS
from training.distributed.processes import LAUNCHER_GONE
from training.errors import print_to_stderr

SAME_REQUEST = 5.0  # seconds


class StopRequest:
    """Records a signal until the training loop asks.

    Args:
        preemption: names of `preemption_signals`.

    Attributes:
        signal: number of the signal; None without a request.
        preempted: whether one of `preemption` came.
    """

    def __init__(self, preemption: Sequence[str] = ()) -> None:
        self.signal: int | None = None
        self.preempted = False
        signal.setitimer(signal.ITIMER_REAL, 0)  # of an earlier run in this process
        preempts = [signal.Signals[name] for name in preemption]
        self._requests = [number for number in REQUESTS if number not in preempts]
        for number in (*self._requests, LAUNCHER_GONE):
            signal.signal(number, self._request)
        for number in preempts:
            signal.signal(number, self._preempt)
            if number in early_signals.received:
                self._preempt(number, None)
        early_signals.received.clear()  # a later run in this process has its own

    @property
    def exit_code(self) -> int:
        """Return what a shell reports for a process that the signal ended."""
        return 128 + (self.signal or 0)

    def agreed(self, other: bool) -> tuple[bool, bool]:
        """Return whether any rank was asked to stop, and whether `other` holds on any; the same on all ranks."""
        device = get_accelerator().current_device_name()
        asked = torch.zeros(3, device=device)
        # Filled on the device, as the host would wait for a copy.
        asked[0], asked[1], asked[2] = self.signal or 0, other, self.preempted
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        number, anybody, preempted = asked.tolist()
        self.preempted = bool(preempted)
        if number:
            self.signal = int(number)
        if number == LAUNCHER_GONE and torch.distributed.get_rank() == 0:  # whichever rank noticed it
            print_to_stderr("error: the launcher is gone; the run saves and ends")
        return bool(number), bool(anybody)

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.preempted = True

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self._set_action(signal.SIG_IGN)
        signal.signal(signal.SIGALRM, lambda *_: self._set_action(signal.SIG_DFL))
        signal.setitimer(signal.ITIMER_REAL, SAME_REQUEST)

    def _set_action(self, action: signal.Handlers) -> None:
        for number in self._requests:
            signal.signal(number, action)
