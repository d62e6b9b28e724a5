"""SIGTERM and SIGINT: save after the step that is under way, and leave; a second one leaves at once.

A launcher passes a signal on by others (Ctrl-C arrives as SIGINT and, from the launcher, as SIGTERM), so whatever comes
within a second of the first is the same request. The ranks hear of it at different steps; `StopRequest.agreed` lets
them stop after the same one. It costs one number summed over the ranks a step. A launcher that is gone is a request
too (`training.distributed.processes`).
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

import torch
from deepspeed.accelerator import get_accelerator

from training.distributed.processes import LAUNCHER_GONE

SAME_REQUEST = 1.0  # seconds


class StopRequest:
    """Remembers a signal until the loop asks.

    Attributes:
        signal: the signal's number; None as long as nobody wants to stop.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, LAUNCHER_GONE):
            signal.signal(number, self._take)

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that the signal ended."""
        return 128 + (self.signal or 0)

    def agreed(self, other: bool) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether `other` holds on any rank; the same on all of them."""
        device = get_accelerator().current_device_name()
        asked = torch.tensor([float(self.signal or 0), float(other)], device=device)
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        number, anybody = asked.tolist()
        if number:
            self.signal = int(number)
        return bool(number), bool(anybody)

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None and number != LAUNCHER_GONE and now - self._since >= SAME_REQUEST:
            os._exit(128 + number)
        if self.signal is None:
            self.signal, self._since = number, now
