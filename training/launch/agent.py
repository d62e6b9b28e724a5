"""Starts a run's ranks on one host, and ends them, as the supervisor says (`training.launch.supervisor`).

Its order comes as a line of JSON on standard input. Each further line asks the ranks to save and leave, by the signal
that it names; so do a signal to this process and the input's end, which comes as well when the supervisor is killed or
its connection breaks. Saving may take as long as a run may go without progress (the order's `patience`): one that hangs
ends itself before. What is left then is killed, and with the ranks ends all that they started. Where a rank has failed,
here or, as the line says, elsewhere, there is nothing to save: the others get FAREWELL seconds for a few words.

A run's processes carry its name in their environment, by which those that a fault left behind are found (`look`).
This file is imported by nothing heavy, so that a start over ssh takes little more than ssh itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from common.whole_files import read_regular, regular

RUN = "PIPETUNE_RUN"  # in the environment: the name of a run that a supervisor has started
FAREWELL = 10.0  # seconds to hear the failure detector's verdict, tell it and leave
FAILED = b"failed"  # the line of a supervisor that knows of a failure
LOOK = 0.1  # seconds between two looks
GONE = 30.0  # seconds for what was killed to be gone
TAIL = 2**16  # bytes at the end of metrics.jsonl
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl.h: orphans below this process become its children


def main() -> None:
    """Obey the order on standard input, or say what there is on this host."""
    if len(sys.argv) > 1:
        print(json.dumps(look(*sys.argv[1:])))
        return
    with open(0, "rb", buffering=0, closefd=False) as orders:
        order = json.loads(orders.readline())
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    os._exit(serve(**order))


def serve(
    command: list[str], environment: dict[str, str], numbers: list[int], patience: float, signals: list[int]
) -> int:
    """Run a command as these ranks; the exit code of the one that failed first, as a shell would give it.

    Args:
        patience: seconds for them to save and leave.
        signals: what asks for that besides SIGTERM, and is passed on as it is.
    """
    ranks = []
    for local, rank in enumerate(numbers):
        place = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_SIZE": str(len(numbers))}
        words = [sys.executable, "-u", *command]
        ranks.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, env=os.environ | environment | place))
    ends: list[float] = []

    def ask(number: int = signal.SIGTERM, seconds: float = patience) -> None:
        ends.append(time.monotonic() + seconds)
        for rank in ranks:
            rank.send_signal(number)

    def obey() -> None:
        while words := os.read(0, 64).split():
            if FAILED in words:
                ask(seconds=FAREWELL)
            else:
                ask(int(words[-1]))
        ask()

    for number in (signal.SIGTERM, *signals):  # which Slurm sends to each process of a step
        signal.signal(number, lambda number, _: ask(number))
    threading.Thread(target=obey, daemon=True).start()
    failed = 0
    while None in (codes := [rank.poll() for rank in ranks]):
        failed = failed or next(filter(None, codes), 0)
        if failed and not ends:
            ask(seconds=FAREWELL)
        if ends and time.monotonic() > min(ends):
            break
        time.sleep(LOOK)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    failed = failed or next(filter(None, [rank.wait() for rank in ranks]), 0)
    return failed if failed >= 0 else 128 - failed


def look(save_path: str, run: str) -> dict[str, Any]:
    """End what is left of a run on this host; how the others can reach it, and how far the run has come.

    Returns:
        address, port: where ranks can meet.
        changed, step: when metrics.jsonl was written to, and the last step in it; 0 without.
        saved: the step of the newest checkpoint; 0 without.
    """
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(RUN) == run:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=GONE)
    found = {"address": reached_address(), "port": free_port(), "changed": 0, "step": 0, "saved": 0}
    with suppress(OSError, ValueError), open(Path(save_path) / "metrics.jsonl", "rb", opener=regular) as metrics:
        found["changed"] = os.fstat(metrics.fileno()).st_mtime_ns
        metrics.seek(max(0, metrics.seek(0, os.SEEK_END) - TAIL))
        found["step"] = int([b"0", *re.findall(rb'"step": ?(\d+)', metrics.read())][-1])
    with suppress(OSError, ValueError):
        found["saved"] = int(read_regular(Path(save_path) / "latest").decode().rpartition("-")[2])
    return found


def reached_address() -> str:
    """That by which the supervisor has reached this host, which is in the network that the hostfile's names mean."""
    reached = os.environ.get("SSH_CONNECTION", "127.0.0.1").split()[-2:][0]
    if not reached.startswith("127.") and reached != "::1":
        return reached
    interfaces = psutil.net_if_addrs().values()
    found = [each.address for addresses in interfaces for each in addresses if each.family == socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), reached)


def free_port() -> int:
    """A port for the processes of a run to meet at, which stays theirs while this process lives, also through an exec.

    A socket that is bound and does not listen keeps the kernel from giving the port to others; who asks for it gets it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    held.set_inheritable(True)
    port: int = held.getsockname()[1]
    held.detach()
    return port
