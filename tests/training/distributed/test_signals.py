"""A run that is asked to stop saves, unless it is asked again later."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT

ASKED = """
import os, signal, sys, time
from training.distributed import signals
signals.SAME_REQUEST = float(sys.argv[1])
stop = signals.StopRequest()
stop.signal = int(sys.argv[2]) or None
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
print(stop.exit_code, flush=True)
while signal.getsignal(signal.SIGTERM) is signal.SIG_IGN and float(sys.argv[1]) < 1:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("known", [0, signal.SIGTERM], ids=["asked first", "another rank was asked first"])
@pytest.mark.parametrize(("same_request", "code"), [(1e4, 0), (0.1, -signal.SIGTERM)])
def test_only_a_later_signal_ends_a_rank_at_once(same_request: float, code: int, known: int) -> None:
    words = [sys.executable, "-c", ASKED, str(same_request), str(int(known))]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.endswith(f"{128 + (known or signal.SIGINT)}\n"), result.stderr
    assert result.returncode == code


TWO_RUNS = """
import os, signal, time
from training.distributed import signals
signals.SAME_REQUEST = 0.2
for run in range(2):
    stop = signals.StopRequest()
    time.sleep(0.5 * run)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code == 128 + signal.SIGTERM
os._exit(0)  # as a rank ends, whose timer must not meet Python's teardown
"""


def test_each_run_of_a_process_has_its_own_request() -> None:
    result = subprocess.run([sys.executable, "-c", TWO_RUNS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


PREEMPTED = """
import os, signal
from training.distributed import signals
stop = signals.StopRequest(["SIGUSR1", "SIGHUP"])
for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR1):
    os.kill(os.getpid(), number)
print(stop.preempted, stop.exit_code, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still there", flush=True)
os._exit(0)
"""


def test_preemption_is_a_request_that_may_be_repeated() -> None:
    result = subprocess.run([sys.executable, "-c", PREEMPTED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.endswith(f"True {128 + signal.SIGUSR1}\nstill there\n"), result.stderr
    assert result.returncode == 0
