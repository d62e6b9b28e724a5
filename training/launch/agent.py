"""Start and end a run's ranks on one host for its supervisor (`training.launch.supervisor`).

The order is a line of JSON on standard input. Each further line is a signal by which the ranks are asked to save and
leave; so are a signal to this process and the end of the input, as when the supervisor is killed or its connection
breaks. Saving may take the order's `patience`: a rank that hangs ends itself before. Then the ranks and all that they
started are killed. If a rank has failed, here or elsewhere (FAILED), there is nothing to save, and the others get
FAREWELL seconds to print the verdict.

A run's processes have its name in their environment, by which `inspect_host` finds what a fault left behind.
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
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from common.whole_files import read_regular, regular

ROOT = Path(__file__).parents[__name__.count(".")]  # of the packages
PREFIX = f"import sys; sys.path.insert(0, {str(ROOT)!r});"
AGENT = (sys.executable, "-c", f"{PREFIX} from {__name__} import main; main()")
RUN = "PIPETUNE_RUN"  # in the environment: the name of a run that a supervisor has started
FAREWELL = 10.0  # seconds to receive and print the failure detector's verdict
FAILED = b"failed"  # line on standard input: a rank failed on another host
POLL = 0.1  # seconds between two looks
GONE = 30.0  # seconds for killed processes to be gone
TAIL = 2**16  # bytes at the end of metrics.jsonl
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl.h: orphans below this process become its children


Answer = dict[str, Any]  # of `inspect_host`


def main() -> None:
    """Follow the order on standard input; with arguments, print what `inspect_host` finds."""
    if len(sys.argv) > 1:
        print(json.dumps(inspect_host(*sys.argv[1:])))
        return
    with open(0, "rb", buffering=0, closefd=False) as orders:
        order = json.loads(orders.readline())
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    os._exit(serve(**order))


def serve(
    command: list[str], environment: dict[str, str], numbers: list[int], patience: float, signals: list[int]
) -> int:
    """Run a command as these ranks; return the exit code of the first that failed, as a shell would give it.

    Args:
        patience: seconds for them to save and leave.
        signals: those of `preemption_signals`, which are passed on.
    """
    ranks = []
    for local, rank in enumerate(numbers):
        place = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_SIZE": str(len(numbers))}
        words = [sys.executable, "-u", *command]
        ranks.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, env=os.environ | environment | place))
    deadlines: list[float] = []

    def ask_to_leave(number: int = signal.SIGTERM, seconds: float = patience) -> None:
        deadlines.append(time.monotonic() + seconds)
        for rank in ranks:
            rank.send_signal(number)

    def read_input() -> None:
        while words := os.read(0, 64).split():
            if FAILED in words:
                ask_to_leave(seconds=FAREWELL)
            else:
                ask_to_leave(int(words[-1]))
        ask_to_leave()

    for number in (signal.SIGTERM, *signals):  # which Slurm sends to each process of a step
        signal.signal(number, lambda number, _: ask_to_leave(number))
    threading.Thread(target=read_input, daemon=True).start()
    failed = 0
    while None in (codes := [rank.poll() for rank in ranks]):
        failed = failed or next(filter(None, codes), 0)
        if failed and not deadlines:
            ask_to_leave(seconds=FAREWELL)
        if deadlines and time.monotonic() > min(deadlines):
            break
        time.sleep(POLL)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    failed = failed or next(filter(None, [rank.wait() for rank in ranks]), 0)
    return failed if failed >= 0 else 128 - failed


def inspect_host(save_path: str, run: str) -> Answer:
    """Kill what is left of a run on this host; find its address and how far the run is.

    Returns:
        address, port: for a rendezvous.
        changed, step: when metrics.jsonl was last written, and the last step in it; 0 without.
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
    """Return the address by which the supervisor reached this host, in the network of the hostfile's names."""
    reached = os.environ.get("SSH_CONNECTION", "127.0.0.1").split()[-2:][0]
    if not reached.startswith("127.") and reached != "::1":
        return reached
    addresses = chain.from_iterable(psutil.net_if_addrs().values())
    found = [each.address for each in addresses if each.family == socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), reached)


def free_port() -> int:
    """Reserve a port for a rendezvous while this process lives, also through an exec.

    While a bound socket does not listen, the kernel assigns its port to nobody, but who asks for that port gets it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    held.set_inheritable(True)
    port: int = held.getsockname()[1]
    held.detach()
    return port
