"""Notices that a rank died, failed or hangs, finds out which came first, and tells all ranks.

A thread in rank 0's process holds one connection to each rank (`training.distributed.lifeline`). A connection that
closes without a farewell is a rank that died; a host that vanishes without closing anything is found by TCP's keepalive
within half a minute. When one rank fails, others soon fail after it because they were talking to it, so reports are
collected for a moment: an error that is not about communication counts before a silent death, and that before errors of
communication. A run that makes no progress for `timeout_minutes` is asked where each rank is: the one at fault does not
answer, or is the one that does not wait for others.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from os import dup
from typing import Any

TOGETHER = 2.0  # seconds from the first report to the verdict
ANSWER = 5.0  # seconds for a rank to say where it is
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, tries


@dataclass(frozen=True)
class Member:
    """A rank as a person knows it."""

    rank: int
    stage: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, host {self.host})"


@dataclass(frozen=True)
class Failure:
    """What a rank says when it cannot go on.

    Attributes:
        text: one line.
        report: a traceback, or nothing for a user's mistake.
        waiting: whether it failed while it talked to other ranks: likely because of them.
        code: the exit code to leave with.
    """

    text: str
    report: str = ""
    waiting: bool = False
    code: int = 1


@dataclass(frozen=True)
class Verdict:
    """What ended the run.

    Attributes:
        text: one line that names the rank.
        speaker: the rank that prints it.
        report: what is printed before it.
        code: the exit code of all ranks.
    """

    text: str
    speaker: int
    report: str = ""
    code: int = 1

    @classmethod
    def gone(cls, member: Member, members: list[Member]) -> Verdict:
        """A rank's process ended without a word."""
        text = f"{member} is gone without a word: killed from outside, for example because memory ran out"
        return cls(text, speaker_beside(member.rank, members))


class Watchdog:
    """Watches `world_size` ranks.

    Attributes:
        port: where ranks connect.
    """

    def __init__(self, world_size: int, timeout_minutes: float, secret: bytes) -> None:
        self._listener = Listener(("", 0), backlog=world_size, authkey=secret)
        self.port: int = self._listener.address[1]
        self._timeout = timeout_minutes
        self._lines: dict[Connection, int] = {}
        self._done: set[int] = set()
        self._failures: dict[int, Failure | None] = {}  # by rank, in the order they came; None for a silent death
        self._first_failure = 0.0
        self._marked: tuple[float, str] | None = None

    def start(self, members: list[Member]) -> None:
        """Begin to watch."""
        self._members = members
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def mark(self, what: str) -> None:
        """Note progress; from the first time on the timeout counts."""
        self._marked = (time.monotonic(), what)

    def _watch(self) -> None:
        while len(self._lines) < len(self._members):
            self._accept()
        while len(self._done) < len(self._members):
            for line in self._ready(timeout=0.5):
                self._take(line)
            if self._failures and time.monotonic() - self._first_failure > TOGETHER:
                self._tell({"kind": "verdict", "verdict": asdict(self._judge())})
                return
            if not self._failures and self._marked and time.monotonic() - self._marked[0] > self._timeout * 60:
                self._tell({"kind": "verdict", "verdict": asdict(self._find_hanging(self._marked[1]))})
                return
        self._tell({"kind": "end"})

    def _accept(self) -> None:
        try:
            line = self._listener.accept()
            _keep_alive(line)
            self._lines[line] = json.loads(line.recv_bytes())["rank"]
        except (AuthenticationError, EOFError, OSError):
            pass  # some other program knocked

    def _ready(self, timeout: float) -> list[Connection]:
        """The lines on which something came."""
        ready = wait(self._lines, timeout)
        return [line for line in self._lines if line in ready]

    def _take(self, line: Connection) -> dict[str, Any]:
        """Receive one message, or the news that a rank is gone."""
        rank = self._lines[line]
        try:
            message: dict[str, Any] = json.loads(line.recv_bytes())
        except (EOFError, OSError):
            message = {"kind": "gone"}
            del self._lines[line]
        kind = message.pop("kind")
        if kind == "done":
            self._done.add(rank)
        elif kind in ("gone", "failed") and rank not in self._done and rank not in self._failures:
            self._first_failure = self._first_failure or time.monotonic()
            self._failures[rank] = Failure(**message) if kind == "failed" else None
        return message if kind == "place" else {}

    def _tell(self, message: dict[str, Any]) -> None:
        """Send to all ranks; to rank 0 last, as its process may end at once, and this thread with it."""
        for line in sorted(self._lines, key=self._lines.__getitem__, reverse=True):
            with suppress(OSError):  # it may be gone as well
                line.send_bytes(json.dumps(message).encode())

    def _alive(self) -> list[Member]:
        connected = set(self._lines.values())
        return [member for member in self._members if member.rank in connected]

    def _speaker(self, rank: int) -> int:
        return speaker_beside(rank, self._alive())

    def _judge(self) -> Verdict:
        """Which of the failures made the others."""
        rank, failure = min(self._failures.items(), key=lambda item: _suspicion(item[1]))
        member = self._members[rank]
        if failure is None:
            return Verdict.gone(member, self._alive())
        shared = len(self._members) > 1 and all(self._failures.get(each.rank) == failure for each in self._members)
        text = failure.text if shared and not failure.report else f"{member}: {failure.text}"
        return Verdict(text, self._speaker(rank), failure.report, failure.code)

    def _find_hanging(self, last: str) -> Verdict:
        """Ask every rank where it is; the one that holds the others up."""
        self._tell({"kind": "where"})
        places: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + ANSWER
        while len(places) < len(self._members) and (left := deadline - time.monotonic()) > 0:
            for line in self._ready(left):
                rank = self._lines[line]
                if found := self._take(line):
                    places[rank] = found
        silent = [member for member in self._members if member.rank not in places]
        busy = [member for member in self._members if member.rank in places and not places[member.rank]["waiting"]]
        after = f"nothing moved for {self._timeout:g} minutes (timeout_minutes) after {last}"
        if silent:
            told = " and ".join(map(str, silent))
            return Verdict(f"{told} hangs and does not answer: {after}", self._speaker(silent[0].rank))
        suspects = busy or self._members
        told = " and ".join(f"{member} in {places[member.rank]['place']}" for member in suspects)
        report = "".join(f"{member}:\n{places[member.rank]['report']}" for member in suspects)
        verb = "hangs" if busy else "wait for each other"
        return Verdict(f"{told}: {verb}; {after}", self._speaker(suspects[0].rank), report)


def speaker_beside(rank: int, members: list[Member]) -> int:
    """Who speaks about a rank: the last of the others, as a launcher ends its processes in their order."""
    others = [member.rank for member in members if member.rank != rank]
    return others[-1] if others else rank


def _suspicion(failure: Failure | None) -> int:
    if failure is None:
        return 1
    return 2 if failure.waiting else 0


def _keep_alive(line: Connection) -> None:
    """Let the kernel ask now and then whether the other host is still there."""
    with socket.socket(fileno=dup(line.fileno())) as view:
        view.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):
                view.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
