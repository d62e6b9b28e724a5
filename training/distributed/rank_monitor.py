"""Connect a rank to the failure detector, which ends all ranks when one fails, and hold the lease of the run's folder.

A thread of each rank holds the connection to the detector in rank 0's process
(`training.distributed.failure_detector`). The main thread reports its errors there; a process that dies closes it. The
detector sends all ranks the same verdict. The thread then ends the process, as the main thread may be waiting for a
lost rank. The rank that prints the verdict leaves last, so only the launcher's own lines follow it.

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from common.lease import Held, Lease
from training.distributed.disk import Disk
from training.distributed.failure_detector import (
    DIED,
    FailureDetector,
    Report,
    how_lost,
    keep_alive,
    lost_rank,
)
from training.distributed.gpu_progress import current_instruction, needs_no_other_rank
from training.distributed.processes import ProcessInfo, agreed, gather
from training.distributed.rendezvous import listen
from training.errors import ConfigError, RunRefused, describe_error, with_traceback
from training.launch.pdsh import end_soon

# Files in which a rank waits for others.
COMMUNICATION = ("torch/distributed/", "deepspeed/comm/", "training/distributed/communication.py")
LEASE = "pipetune-lease"  # of a run's folder
LOOK = 0.1  # seconds between two looks at a lease whose holder may be dead
LAST_WORDS = 2.5  # seconds until the launcher has printed that the other ranks left
CONNECT = 60.0  # seconds to reach the detector


class RankMonitor:
    """`with RankMonitor(process, stage, minutes) as monitor:` around all that a rank does together with others.

    Args:
        timeout_minutes: how long the run may go without a `mark`, after the first one.
        port: of the detector; 0 for any free one.

    Raises:
        RunRefused: some rank cannot reach the detector, or its port is in use.
    """

    def __init__(self, process: ProcessInfo, stage: int, timeout_minutes: float, port: int = 0) -> None:
        self._process = process
        self._lease: Lease | None = None
        self._detector: FailureDetector | None = None
        listener = None
        with agreed():
            if process.rank == 0:
                listener = open_port(process, port)
        name = f"rank {process.rank} (stage {stage}, host {socket.gethostname()})"
        ranks = gather((name, listener.getsockname()[1] if listener else 0, secrets.token_hex()))
        self._rank_0, open_at, secret = ranks[0]
        if listener:
            self._detector = FailureDetector([each for each, _, _ in ranks], timeout_minutes, listener, secret)
        with agreed():
            self._connection = connect(open_at, f"{secret} {process.rank}\n")
        self._thread = threading.Thread(target=self._listen, name="monitor", daemon=True)
        self._thread.start()

    def hold(self, folder: Path, disk: Disk) -> None:
        """Take the lease of the run's folder until the end of the run, for all ranks of a disk."""
        if disk.owns_folder:
            self._lease = take_folder(folder, self._report)
            self._folder = folder

    def mark(self, what: str) -> None:
        """Note progress, which rank 0 does for all; raise a ConfigError if another run has taken over the folder."""
        if self._detector:
            self._detector.mark(what)
        if self._lease and (successor := self._lease.successor()):
            raise taken_over(self._folder, successor)

    def expect_no_marks(self) -> None:
        """Expect no further mark; a rank that dies is noticed all the same."""
        if self._detector:
            self._detector.expect_no_marks()

    def __enter__(self) -> RankMonitor:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, (RunRefused, SystemExit)):  # all ranks leave, and know why
            self._send("done")
        else:
            self._report(error)
        self._thread.join()  # ends when all are done, or in `_leave`
        if self._lease:
            self._lease.release()

    def _report(self, error: BaseException) -> None:
        self._send("failed", **asdict(failure_of(error)))

    def _send(self, kind: str, **fields: Any) -> None:
        with suppress(OSError):  # if the detector is gone, the thread notices
            self._connection.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def _listen(self) -> None:
        lost = DIED
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    kind = message.pop("kind")
                    if kind == "end":
                        return
                    if kind == "where":
                        self._send("position", **asdict(current_position(self._process.local_rank)))
                    else:
                        self._leave(Report(**message))
        except OSError as error:
            lost = how_lost(error)
        self._leave(lost_rank(self._rank_0, lost, speaker=self._process.world_size - 1))

    def _leave(self, verdict: Report) -> None:
        if verdict.unreachable and self._process.local_rank == 0:
            end_soon()
        if self._lease:
            self._lease.release()
        if verdict.speaker == self._process.rank:
            time.sleep(LAST_WORDS)
            print(f"error: {with_traceback(verdict.text, verdict.trace)}", file=sys.stderr, flush=True)
        os._exit(verdict.code)


def failure_of(error: BaseException) -> Report:
    """Describe an exception for the detector."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename if error.__traceback__ else ""
    code, text, trace = describe_error(error)
    return Report(text, trace, waiting=any(part in innermost for part in COMMUNICATION), code=code)


def current_position(device: int) -> Report:
    """Find where the main thread is, and whether this process waits for other ranks.

    It waits if a thread is inside communication, or if the GPU has not finished its queue: NCCL's kernels wait there
    while Python waits for their result. It does not if the GPU is in a computation of the schedule
    (`training.distributed.gpu_progress`): then the others wait for this one. A GPU whose host hangs finishes its queue,
    or waits for one whose host hangs, as schedules have no cycles.
    """
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    stacks = {ident: "".join(traceback.format_stack(frame)) for ident, frame in frames.items()}
    waiting = any(part in stack for stack, part in product(stacks.values(), COMMUNICATION))
    on_gpu = ""
    if torch.cuda.is_initialized() and not torch.cuda.default_stream(device).query():
        name = current_instruction()
        waiting = not needs_no_other_rank(name)
        on_gpu = f", its GPU in {name or 'what follows the schedule'}"
    main = threading.main_thread().ident or 0
    code = frames[main].f_code
    return Report(
        f"{Path(code.co_filename).name}:{frames[main].f_lineno} in {code.co_name}{on_gpu}", stacks[main], waiting
    )


def take_folder(folder: Path, lost: Callable[[ConfigError], object]) -> Lease:
    """Take the lease of a run's folder, or raise a ConfigError; wait while its holder may be dead.

    Args:
        lost: called in another thread when another run has taken over.
    """
    lease = Lease(folder, LEASE, lambda successor: lost(taken_over(folder, successor)))
    waits = False
    while True:
        try:
            lease.take()
            return lease
        except Held as held:
            if held.patience == 0:
                raise ConfigError(
                    f"save_path: {folder}: is being trained by {held.holder}; expected one run a folder: "
                    "stop that one, or choose another save_path"
                ) from None
            if held.holder and not waits:
                print(f"save_path: waiting up to {held.patience:.0f} s for a heartbeat of {held.holder}", flush=True)
                waits = True
            time.sleep(LOOK)
        except OSError as error:
            raise ConfigError(f"save_path: {folder}: cannot be written: {error.strerror}") from None


def taken_over(folder: Path, successor: str) -> ConfigError:
    """Make the error of a run whose folder another one writes to."""
    lost = f"this run stood still and lost its lease, or somebody removed it; held now by {successor}"
    return ConfigError(f"save_path: {folder}: {lost}; expected one run a folder")


def open_port(process: ProcessInfo, port: int) -> socket.socket:
    """Open the detector's port."""
    try:
        return listen(process.world_size, process.local_size, port)
    except OSError as error:
        raise ConfigError(
            f"ports.failure_detector: {port}: {error.strerror} on host {socket.gethostname()}; expected a free port"
        ) from None


def connect(port: int, first_line: str) -> socket.socket:
    address = os.environ["MASTER_ADDR"]
    try:
        connection = socket.create_connection((address, port), CONNECT)
        connection.sendall(first_line.encode())
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} cannot reach rank 0 at {address}:{port}: {error}; "
            "expected all ports open between the machines of a run"
        ) from None
    connection.settimeout(None)
    keep_alive(connection)
    return connection
