"""Have images decoded by other processes while a step is computed.

Who needs a micro-batch's images asks for them early and takes them when they are due, in any order. That a process was
killed, or cannot read an image, is an error in a line where its answer is taken; nothing waits for one that is gone.
The processes end with this one, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.early_signals import ALL
from common.parent import end_with_this_process, without_sigterm
from data.errors import DataError
from data.images.image import Image
from data.images.messages import receive, send

ROOT = Path(__file__).parents[__name__.count(".")]  # where imports begin
MOST, SHARE = 8, 8  # processes at most, and cores for one: others train
PATIENCE = 5.0  # seconds for a process to end whose socket has
DEAF_TO = ALL  # signals that go to whole groups of processes: the step they interrupt needs its images, to be saved
# An image is one thread's work, and is not done on a GPU.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}


class UnreadableImage(DataError):
    """An image cannot be read, or is another one than it was."""


class PictureSettings(NamedTuple):
    """Hold what a `Pictures` is made of."""

    folder: Path
    min_pixels: int | None = None
    max_pixels: int | None = None


class Decoders:
    """Processes that make the tensors of lists of images.

    Args:
        names: of the tensors that are wanted, in order.
    """

    def __init__(self, settings: PictureSettings, names: Sequence[str]) -> None:
        folder, *limits = settings
        told = json.dumps([str(folder.absolute()), *limits, list(names)])
        count = min(MOST, max(1, len(os.sched_getaffinity(0)) // SHARE))
        self._workers = [_Worker(told) for _ in range(count)]
        self._asked = 0
        self._answers: dict[int, dict[str, Tensor] | DataError] = {}
        self._unwanted: set[int] = set()

    def ask(self, lists: Sequence[Sequence[Image]]) -> list[int]:
        """Ask for the tensors of each of these lists of images; return tickets for them."""
        tickets = list(range(self._asked, self._asked + len(lists)))
        self._asked += len(lists)
        for number, worker in enumerate(self._workers):
            jobs = [job for job in zip(tickets, lists, strict=True) if job[0] % len(self._workers) == number]
            if jobs:
                worker.give(jobs)
        return tickets

    def take(self, ticket: int) -> dict[str, Tensor]:
        """Wait for the tensors that were asked for; each ticket is taken once, or dropped.

        Raises:
            UnreadableImage: of an image.
            DataError: the process that decodes it was ended.
        """
        while ticket not in self._answers:
            number, answer = self._workers[ticket % len(self._workers)].next_answer()
            if number in self._unwanted:
                self._unwanted.remove(number)
            else:
                self._answers[number] = answer
        answer = self._answers.pop(ticket)
        if isinstance(answer, DataError):
            raise answer
        return answer

    def drop(self, tickets: Iterable[int]) -> None:
        """Forget tickets that nobody will take."""
        for ticket in tickets:
            if self._answers.pop(ticket, None) is None:
                self._unwanted.add(ticket)


@cache
def decoders(settings: PictureSettings, names: tuple[str, ...]) -> Decoders:
    """Return this process's decoders of a model, which training and evaluation share."""
    return Decoders(settings, names)


class _Worker:
    """One process that decodes."""

    def __init__(self, told: str) -> None:
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with its, without_sigterm():
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", str(its.fileno()), told],
                stdin=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
                pass_fds=[its.fileno()],
                preexec_fn=end_with_this_process(DEAF_TO),  # noqa: PLW1509  # which makes system calls only
            )
        self._channel = own
        self._gone = ""  # why, once it is
        weakref.finalize(self, _end, self._process)

    def give(self, jobs: Sequence[tuple[int, Sequence[Image]]]) -> None:
        """Send jobs; that the process is gone is found when its answers are taken."""
        with suppress(ConnectionError):
            send(self._channel, {"jobs": jobs})

    def next_answer(self) -> tuple[int, dict[str, Tensor] | DataError]:
        """Wait for an answer: a ticket, and its tensors or what is wrong."""
        message = None if self._gone else receive(self._channel)
        if message is None:
            self._gone = self._gone or self._why()
            raise DataError(self._gone)
        note, arrays = message
        if "error" in note:
            return note["ticket"], UnreadableImage(*note["error"])
        return note["ticket"], {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _why(self) -> str:
        """Say how the process ended."""
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            _end(self._process)
            return "the process that decodes the images does not answer"
        reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
        hint = "; is there enough memory?" if code == -signal.SIGKILL else ""
        return f"the process that decodes the images {reason}{hint}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that has nothing to lose."""
    process.kill()
    process.wait()
