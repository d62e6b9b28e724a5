"""End a run that was started by pdsh, as DeepSpeed's launcher does on several hosts.

pdsh keeps an ssh to each host and ends when all of them have. An ssh to a frozen or unreachable host never ends, as it
sends no keepalive, and the command hangs. So if a run ends because of such a host, the ssh processes that are left
after GRACE are killed. A pdsh whose launcher is gone goes on, so ranks on its host watch it.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

import psutil

GRACE = 5  # seconds for the hosts that answer to end


def find() -> psutil.Process | None:
    """Find this run's pdsh, if it was started on this host."""
    run: list[str] = []
    with suppress(psutil.Error):  # pdsh's command contains that of its launcher
        run = [word for word in psutil.Process(os.getppid()).cmdline() if word.startswith(("--world_info", "--master"))]
    for process in psutil.process_iter(["name", "cmdline"]) if run else ():
        command = " ".join(process.info["cmdline"] or ())
        if (process.info["name"] or "").startswith("pdsh") and all(word in command for word in run):
            return process
    return None


def end_soon() -> None:
    """Kill what is left after GRACE of the ssh processes of this run's pdsh, if it was started on this host."""
    if pdsh := find():
        waiting = " ".join(str(child.pid) for child in pdsh.children())
        # In a session of its own, as the launcher kills this process with its children. After SIGTERM ssh leaves with
        # an exit code that fails the command; after SIGKILL pdsh would count it as success.
        subprocess.Popen(
            ["sh", "-c", f"(sleep {GRACE}; kill {waiting}; sleep {GRACE}; kill -9 {waiting}) &"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).wait()
