"""A process's children end with it, also when it is killed; one of each kind, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from common.parent import without_sigterm
from tests.conftest import FAQ, ROOT
from tests.launching import catches, eventually, start, topology, write_config
from training.launch.agent import free_port

# Starts the builder and is killed at once.
PARENT = """
import os, signal, subprocess, sys
words = [sys.executable, "-m", "data.tokenized.builder", str(os.getpid())]
child = subprocess.Popen(words, stdin=int(sys.argv[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:])"
SLEEPER = f"#!{sys.executable}\nimport os, sys, time\n"
SLEEPER += "print(os.getpid(), file=open(os.environ['PID_FILE'] + '.new', 'w'), flush=True)\n"
SLEEPER += "os.rename(os.environ['PID_FILE'] + '.new', os.environ['PID_FILE'])\ntime.sleep(1000)\n"

# A process that starts a foreign program.
SHOWS = """
import sys
from pathlib import Path
from quickstart.job import QuickstartJob, run
run(QuickstartJob(Path(), Path(), Path(), [], [], "", {}), sys.argv[1])
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


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("entry_point", ["train_ds.py", "train_ds_zero.py"])
def test_a_rank_ends_whose_launcher_was_killed_in_its_imports(entry_point: str, tmp_path: Path) -> None:
    """Else it would wait for another rank for half an hour."""
    config = write_config(tmp_path / "run.yml", model_path="m", data_path=str(FAQ), model_topo=topology((1, 2)))
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launcher = start(sys.executable, "-c", LAUNCHER, sys.executable, entry_point, "--config", config, **place)
    launcher.until(lambda: any(catches(each.pid, signal.SIGUSR1) for each in launcher.family()[1:]), pause=0.0)
    (rank,) = launcher.family()[1:]
    psutil.Process(launcher.pid).kill()
    launcher.end()
    try:
        eventually(lambda: not alive(rank.pid))
    finally:
        if alive(rank.pid):
            rank.kill()


def test_sigterm_waits_for_the_end_of_a_fork() -> None:
    """Though another thread may get it."""

    def stop(*_: object) -> None:
        raise InterruptedError

    before, forked, over = signal.signal(signal.SIGTERM, stop), False, threading.Event()
    threading.Thread(target=over.wait).start()
    try:
        with pytest.raises(InterruptedError), without_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            forked = not over.wait(0.1)
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)
    assert forked


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    """A program that writes its process number and never ends."""
    path = tmp_path / "sleeper"
    path.write_text(SLEEPER)
    path.chmod(0o755)
    return path


def ends_with_its_parent(sleeper: Path, *words: str | Path) -> None:
    pid_file = sleeper.with_name("pid")
    launch = start(sys.executable, *words, PID_FILE=str(pid_file))
    launch.until(pid_file.exists)
    child = int(pid_file.read_text())
    psutil.Process(launch.pid).kill()
    launch.end()
    try:
        eventually(lambda: not alive(child))
    finally:
        if alive(child):
            psutil.Process(child).kill()


@pytest.mark.slow
def test_a_command_of_the_quickstart_ends_with_its_parent(sleeper: Path) -> None:
    ends_with_its_parent(sleeper, "-c", SHOWS, sleeper)
