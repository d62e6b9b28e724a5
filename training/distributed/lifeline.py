"""A rank's line to the watchdog: by it a run ends everywhere when it has failed somewhere.

Each rank keeps one connection to the watchdog in rank 0's process (`training.distributed.watchdog`), served by a
thread. The main thread marks progress on it and hands over what made it fail; a process that dies closes it, whatever
killed it. The watchdog answers with a verdict, the same for all: what failed first, and who says so. Every rank leaves
then, from this thread, as the main thread may be waiting for a rank that is no more. The one that speaks leaves last,
so its line is the last of the run but for the launcher's own.

Costs nothing while all is well: no message is sent between joining and leaving.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from training.distributed.processes import Place, gather
from training.distributed.watchdog import Failure, Member, Verdict, Watchdog
from training.errors import RunRefused, ending

COMMUNICATION = ("torch/distributed/", "deepspeed/comm/")  # where a rank waits for others
LAST_WORDS = 2.5  # seconds; by then the launcher has noticed that the other ranks left, and has said so


class Lifeline:
    """`with Lifeline(place, stage, minutes) as lifeline:` around all that a rank does together with others.

    Args:
        stage: of the pipeline, from 0.
        timeout_minutes: how long the run may go without a `mark`, once there was one.
    """

    def __init__(self, place: Place, stage: int, timeout_minutes: float) -> None:
        me = Member(place.rank, stage, socket.gethostname())
        self._secret = secrets.token_bytes()
        self._watchdog = Watchdog(place.world_size, timeout_minutes, self._secret) if place.rank == 0 else None
        port = self._watchdog.port if self._watchdog else 0
        # Names, port and secret go round in the process group; without the secret nobody can join.
        told = gather((asdict(me), port, self._secret.hex()))
        self._members = [Member(**member) for member, _, _ in told]
        _, port, secret = told[0]
        if self._watchdog:
            self._watchdog.start(self._members)
        host = os.environ.get("MASTER_ADDR", "127.0.0.1") if place.rank else "127.0.0.1"
        self._line: Connection = Client((host, port), authkey=bytes.fromhex(secret))
        self._send("joined", rank=place.rank)
        self._rank = place.rank
        self._thread = threading.Thread(target=self._listen, name="lifeline", daemon=True)
        self._thread.start()

    def mark(self, what: str) -> None:
        """Note that the run has got somewhere; rank 0's word counts, as each step needs all ranks."""
        if self._watchdog:
            self._watchdog.mark(what)

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (RunRefused, SystemExit)):  # all ranks leave, and know why
            self._send("done")
        else:
            self._send("failed", **asdict(failure_of(error)))
        self._thread.join()  # ends when all are done, or in `_leave`

    def _send(self, kind: str, **fields: Any) -> None:
        with suppress(OSError):  # where the watchdog is gone, the thread hears of it as well
            self._line.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    def _listen(self) -> None:
        while True:
            try:
                message = json.loads(self._line.recv_bytes())
            except (EOFError, OSError):
                self._leave(Verdict.gone(self._members[0], self._members))
            if message["kind"] == "where":
                self._send("place", **asdict(whereabouts()))
            elif message["kind"] == "end":
                return
            else:
                self._leave(Verdict(**message["verdict"]))

    def _leave(self, verdict: Verdict) -> None:
        if verdict.speaker == self._rank:
            time.sleep(LAST_WORDS)
            print(f"{verdict.report}error: {verdict.text}", file=sys.stderr, flush=True)
        os._exit(verdict.code)


def failure_of(error: BaseException) -> Failure:
    """What the watchdog is told of an exception."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename if error.__traceback__ else ""
    code, text = ending(error)
    return Failure(text, code=code, waiting=any(part in innermost for part in COMMUNICATION))


@dataclass(frozen=True)
class Whereabouts:
    """What a rank's threads are doing.

    Attributes:
        place: of the main thread, as file, line and function.
        report: its whole stack.
        waiting: whether some thread waits for other ranks.
    """

    place: str
    report: str
    waiting: bool


def whereabouts() -> Whereabouts:
    """Look at the threads of this process."""
    frames = sys._current_frames()
    main = frames[threading.main_thread().ident or 0]
    own = threading.get_ident()
    waiting = any(_communicates(frame) for ident, frame in frames.items() if ident != own)
    place = f"{Path(main.f_code.co_filename).name}:{main.f_lineno} in {main.f_code.co_name}"
    return Whereabouts(place, "".join(traceback.format_stack(main)), waiting)


def _communicates(frame: FrameType | None) -> bool:
    while frame:
        if any(part in frame.f_code.co_filename for part in COMMUNICATION):
            return True
        frame = frame.f_back
    return False
