"""A builder ends with its parent, also with one that died before the builder could look."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from tests.conftest import ROOT
from tests.launching import eventually

# Starts the builder and is killed at once.
PARENT = """
import os, signal, subprocess, sys
words = [sys.executable, "-m", "data.tokenized.builder", str(os.getpid())]
child = subprocess.Popen(words, stdin=int(sys.argv[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_builder_ends_whose_parent_was_killed_right_after_its_start() -> None:
    reads, writes = os.pipe()  # open all the time: a builder that lives on waits there for its job
    command = [sys.executable, "-c", PARENT, str(reads)]
    parent = subprocess.run(command, cwd=ROOT, pass_fds=[reads], stdout=subprocess.PIPE, text=True, check=False)
    assert parent.returncode == -9
    eventually(lambda: not alive(int(parent.stdout)))
    os.close(reads)
    os.close(writes)
