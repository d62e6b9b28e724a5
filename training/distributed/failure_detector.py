"""Find the rank that died, failed or hangs, and send all ranks the verdict.

A thread in rank 0's process holds one TCP connection to each rank (`training.distributed.rank_monitor`). If one closes
before its rank is done, the rank died: the kernel closes it, whatever ended the process and however slow the machine.
TCP's keepalive finds a lost host within 20 s. When one rank fails, those that communicate with it fail soon after, so
reports are collected for a moment: an error that is not about communication counts before a silent death, and that
before errors of communication. If the run makes no progress for `timeout_minutes`, each rank is asked for its position:
the one at fault does not answer, or is the one that does not wait. Under NCCL the GPU waits, so its position in the
schedule counts (`training.distributed.gpu_progress`).

A message is a line of JSON, except a connection's first: the run's secret and the rank, within HANDSHAKE. A stranger is
disconnected and holds nobody up.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

TOGETHER = 2.0  # seconds from the first failure to the verdict
LATE = 30.0  # the same if all are errors of communication: their cause, such as a lost host, may be reported later
ANSWER = 20.0  # seconds for a rank to report its position
HANDSHAKE = 10.0  # seconds for a connection's first line
POLL = 0.1  # seconds between two looks at the reports
LONGEST = 2**22  # bytes of a message, which may have a traceback
DIED = "died without an error: killed from outside, for example because memory ran out"
UNREACHABLE = "cannot be reached any more: its host is down, or cut off from the network"


@dataclass(frozen=True)
class Report:
    """A rank's failure, its position at the moment, or the verdict over the run.

    Attributes:
        text: one line.
        trace: the stack, unless the user can fix the error; the speaker of a verdict writes it to a file.
        waiting: whether the rank waits for others, or failed while it communicated with them.
        code: the exit code to leave with.
        speaker: of a verdict, the rank that prints it.
        unreachable: whether the host of the rank at fault does not answer.
    """

    text: str
    trace: str = ""
    waiting: bool = False
    code: int = 1
    speaker: int = 0
    unreachable: bool = False


class FailureDetector:
    """Watches the ranks of a run in a thread.

    Args:
        names: of the ranks, for the verdict.
        timeout_minutes: how long the run may go without a `mark`, after the first one.
        listener: socket to which the ranks connect.
        secret: which they have to send.
    """

    def __init__(self, names: list[str], timeout_minutes: float, listener: socket.socket, secret: str) -> None:
        self._names = names
        self._timeout = timeout_minutes
        self._secret = secret.encode()
        self._connected: dict[int, asyncio.StreamWriter] = {}
        self._done: set[int] = set()
        self._failures: dict[int, Report | str] = {}  # rank -> report, or how its connection was lost; in order
        self._first_failure = 0.0
        self._marked: tuple[float, str] | None = None
        self._positions: dict[int, Report] = {}
        threading.Thread(target=asyncio.run, args=(self._watch(listener),), name="detector", daemon=True).start()

    def mark(self, what: str) -> None:
        """Note progress of the run."""
        self._marked = (time.monotonic(), what)

    def expect_no_marks(self) -> None:
        """Expect no further mark."""
        self._marked = None

    async def _watch(self, listener: socket.socket) -> None:
        await asyncio.start_server(self._serve, sock=listener, limit=LONGEST)
        verdict = None
        while verdict is None and len(self._done) < len(self._names):
            await asyncio.sleep(POLL)
            now = time.monotonic()
            if self._failures:
                certain = any(isinstance(failure, str) or not failure.waiting for failure in self._failures.values())
                if now - self._first_failure > (TOGETHER if certain else LATE):
                    verdict = self._first_to_fail()
            elif (marked := self._marked) and now - marked[0] > self._timeout * 60:
                verdict = await self._find_hanging(marked[1])
        self._send_all({"kind": "verdict", **asdict(verdict)} if verdict else {"kind": "end"})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one connection until it closes."""
        try:
            secret, number = (await asyncio.wait_for(reader.readline(), HANDSHAKE)).split()
            if not hmac.compare_digest(secret, self._secret):
                raise ValueError
        except (asyncio.TimeoutError, asyncio.CancelledError, ValueError, OSError):
            writer.close()
            return
        keep_alive(writer.get_extra_info("socket"))
        rank = int(number)
        self._connected[rank] = writer
        lost = DIED
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                self._take(rank, **json.loads(line))
        except OSError as error:
            lost = how_lost(error)
        except asyncio.CancelledError:  # the watch is over
            pass
        del self._connected[rank]
        self._failed(rank, lost)

    def _take(self, rank: int, kind: str, **fields: Any) -> None:
        if kind == "done":
            self._done.add(rank)
        elif kind == "position":
            self._positions[rank] = Report(**fields)
        else:
            self._failed(rank, Report(**fields))

    def _failed(self, rank: int, failure: Report | str) -> None:
        if rank not in self._done and rank not in self._failures:
            self._first_failure = self._first_failure or time.monotonic()
            self._failures[rank] = failure

    def _send_all(self, message: dict[str, Any]) -> None:
        """Send to all ranks; to rank 0 last, as its process may end at once, and this thread with it."""
        for rank in sorted(self._connected, reverse=True):
            self._connected[rank].write(json.dumps(message).encode() + b"\n")

    def _speaker(self, rank: int) -> int:
        """Choose who prints the verdict over a rank: the last of the others, as launchers end processes in order."""
        return max((each for each in self._connected if each != rank), default=rank)

    def _first_to_fail(self) -> Report:
        """Choose the failure that caused the others."""
        rank, failure = min(
            self._failures.items(), key=lambda each: 1 if isinstance(each[1], str) else 2 * each[1].waiting
        )
        if isinstance(failure, str):
            return lost_rank(self._names[rank], failure, self._speaker(rank))
        shared = not failure.trace and len(self._names) > 1 and list(self._failures.values()).count(failure)
        text = failure.text if shared == len(self._names) else f"{self._names[rank]}: {failure.text}"
        return replace(failure, text=text, speaker=self._speaker(rank))

    async def _find_hanging(self, last: str) -> Report:
        """Ask every rank for its position, and choose the one that holds the others up."""
        self._send_all({"kind": "where"})
        deadline = time.monotonic() + ANSWER
        while len(self._positions) < len(self._names) and time.monotonic() < deadline:
            await asyncio.sleep(POLL)
        after = f"nothing moved for {self._timeout:g} minutes (timeout_minutes) after {last}"
        if silent := [rank for rank in range(len(self._names)) if rank not in self._positions]:
            names = " and ".join(self._names[rank] for rank in silent)
            text = f"{names} hangs and does not answer: {after}"
            return Report(text, speaker=self._speaker(silent[0]), unreachable=True)
        busy = [rank for rank, position in sorted(self._positions.items()) if not position.waiting]
        suspects = busy or sorted(self._positions)
        where = " and ".join(f"{self._names[rank]} in {self._positions[rank].text}" for rank in suspects)
        trace = "".join(f"{self._names[rank]}:\n{self._positions[rank].trace}" for rank in suspects)
        verb = "hangs" if busy else "all wait, for each other or for their GPUs"
        return Report(f"{where}: {verb}; {after}", trace, speaker=self._speaker(suspects[0]))


def how_lost(error: OSError) -> str:
    """Tell a process that died from a host that is lost: a host that runs closes or resets a connection."""
    return DIED if isinstance(error, ConnectionError) else UNREACHABLE


def lost_rank(name: str, how: str, speaker: int) -> Report:
    """Make the verdict over a rank whose connection closed."""
    return Report(f"{name} {how}", speaker=speaker, unreachable=how == UNREACHABLE)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel probe the other host after 8 s of silence, three times, every 4 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 8), (socket.TCP_KEEPINTVL, 4), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
