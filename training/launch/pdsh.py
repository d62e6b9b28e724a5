"""The end of a command that reaches its hosts by pdsh, as DeepSpeed's launcher does.

pdsh holds an ssh to each host and ends when all of them have. One to a host that froze, or whose network is cut, ends
never: nobody asks whether it is still there, and the command hangs. So when a run ends because of that, what is left of
these after a while is ended as well. And a pdsh whose launcher is gone goes on: ranks on its host watch it.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

import psutil

GRACE = 5  # seconds within which the hosts that answer have ended by themselves


def find() -> psutil.Process | None:
    """This run's pdsh, where it was started on this host."""
    run: list[str] = []
    with suppress(psutil.Error):  # its launcher has the words by which pdsh started it
        run = [word for word in psutil.Process(os.getppid()).cmdline() if word.startswith(("--world_info", "--master"))]
    for process in psutil.process_iter(["name", "cmdline"]) if run else ():
        told = " ".join(process.info["cmdline"] or ())
        if (process.info["name"] or "").startswith("pdsh") and all(word in told for word in run):
            return process
    return None


def end_soon() -> None:
    """Let no ssh of this run's pdsh live longer than GRACE, where it was started on this host."""
    if pdsh := find():
        waiting = " ".join(str(child.pid) for child in pdsh.children())
        # In a session of its own: the launcher ends this process with all that is below it. To the first signal ssh
        # answers by an exit code that the command ends with; one that was killed counts as if all was well.
        subprocess.Popen(
            ["sh", "-c", f"(sleep {GRACE}; kill {waiting}; sleep {GRACE}; kill -9 {waiting}) &"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).wait()
