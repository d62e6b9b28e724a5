"""A launch that hangs is ended with all of its processes, and one that is merely slow is not."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests import launching
from tests.launching import BUSY, IDLE, PULSE, Hang, Movement, run, start

HANGING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
print("the child is", child.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
def test_the_whole_tree_of_a_hang_is_killed_and_what_it_printed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = start(sys.executable, "-c", HANGING)
    launch.until(lambda: launch.stdout.endswith("\n"))
    child = int(launch.stdout.split()[-1])
    monkeypatch.setattr(launching, "IDLE", -1.0)
    with pytest.raises(Hang, match=f"(?s)nothing moved for .*the child is {child}"):
        launch.end()
    assert not psutil.pid_exists(launch.pid) and not psutil.pid_exists(child)


def test_a_command_that_ends_before_what_was_awaited_says_why() -> None:
    launch = start(sys.executable, "-c", "raise SystemExit('no room')")
    with pytest.raises(AssertionError, match="no room"):
        launch.until(lambda: False)


def test_output_of_any_length_is_kept() -> None:
    result = run(sys.executable, "-c", "import sys; print('a' * 10**6); print('b' * 10**6, file=sys.stderr)")
    assert (len(result.stdout), len(result.stderr), result.returncode) == (10**6 + 1, 10**6 + 1, 0)


def test_files_beside_those_of_the_command_line_are_watched(tmp_path: Path) -> None:
    config = tmp_path / "run.yml"
    config.touch()
    code = f"import pathlib, time; pathlib.Path({str(tmp_path)!r}, 'new').touch(); time.sleep(3600)"
    launch = start(sys.executable, "-c", code, config)
    launch.until((tmp_path / "new").exists)
    assert (tmp_path / "new", 0) in launch._files()
    launch.kill()
    assert launch.poll() == -9


def test_a_line_a_file_or_computing_is_movement() -> None:
    movement = Movement(0.0)
    printed = {("run.log", 10)}
    assert not movement.hang(IDLE, printed, {})
    assert not movement.hang(2 * IDLE, printed, {})
    assert movement.hang(2 * IDLE + 1, printed, {}) == f"nothing moved for {IDLE + 1:.0f} s"
    assert not movement.hang(3 * IDLE, {("run.log", 11)}, {})
    assert not movement.hang(4 * IDLE, {("run.log", 11)}, {7: PULSE})
    assert not movement.hang(5 * IDLE, {("run.log", 11)}, {8: PULSE}), "of another process"
    assert movement.hang(6 * IDLE + 1, {("run.log", 11)}, {8: 2 * PULSE - 0.1}), "threads that wake up now and then"


def test_a_heartbeat_is_no_movement() -> None:
    movement = Movement(0.0)
    assert not movement.hang(0.0, {("lease", 20)}, {})
    assert not movement.hang(IDLE, {("lease", 0)}, {})
    assert movement.hang(2 * IDLE + 1, {("lease", 20)}, {})


def test_a_loop_without_end_is_told_from_work() -> None:
    movement = Movement(0.0)
    for hour in range(1, 10):
        assert not movement.hang(3600.0 * hour, {("run.log", hour)}, {7: BUSY * hour})
    assert "without a line of output" in movement.hang(40000.0, {("run.log", 9)}, {7: BUSY * 10 + 1})


def test_a_free_port_is_kept_through_an_exec() -> None:
    """Others could get it between the start of a launcher and the moment when its processes meet."""
    holder = "import time; print({port}, flush=True); time.sleep(3600)"
    code = (
        "import os, sys; from training.launch.agent import free_port\n"
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1].format(port=free_port())])"
    )
    listener = (
        "import socket, sys; other = socket.socket()\n"
        "other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(sys.argv[2]))\n"
        "other.bind(('', int(sys.argv[1]))); other.listen()"
    )
    launch = start(sys.executable, "-c", code, holder)
    launch.until(lambda: launch.stdout.endswith("\n"))
    unaware, meeting = (run(sys.executable, "-c", listener, launch.stdout.strip(), reuse) for reuse in "01")
    launch.kill()
    assert "Address already in use" in unaware.stderr
    assert meeting.returncode == 0, meeting.stderr
