"""A run that is asked to stop saves, unless another request follows later."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import ROOT
from tests.launching import heed_signals

ASKED = """
import os, signal, sys
from training.distributed import signals
signals.SAME_REQUEST = 1e4
stop = signals.StopRequest()
stop.signal = int(sys.argv[2]) or None
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    os.kill(os.getpid(), number)
print(stop.exit_code, flush=True)
assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1e4
if sys.argv[1] == "later":  # by hand, as a busy machine may stand still between two signals
    signal.raise_signal(signal.SIGALRM)
os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("later", "known", "last"),
    [
        pytest.param(False, 0, signal.SIGHUP, id="together-asked first"),
        pytest.param(False, signal.SIGTERM, signal.SIGTERM, id="together-another rank was", marks=pytest.mark.slow),
        pytest.param(True, 0, signal.SIGHUP, id="later-asked first", marks=pytest.mark.slow),
        pytest.param(True, signal.SIGTERM, signal.SIGTERM, id="later-another rank was", marks=pytest.mark.slow),
    ],
)
def test_only_a_later_signal_ends_a_rank_at_once(later: bool, known: int, last: int) -> None:
    result = ran(ASKED, "later" if later else "together", str(int(known)), str(int(last)))
    assert result.stdout.endswith(f"{128 + (known or signal.SIGINT)}\n"), result.stderr
    assert result.returncode == (-last if later else 0)


def ran(program: str, *words: str, before: Callable[[], object] = heed_signals) -> subprocess.CompletedProcess[str]:
    """Run a program, whose signals are as `before` leaves them."""
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=before)


HUNG_UP = """
import os, signal
from training.distributed import signals
stop = signals.StopRequest()
os.kill(os.getpid(), signal.SIGHUP)
print(stop.signal, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("before", "signal_taken"),
    [(heed_signals, signal.SIGHUP), (lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), None)],
    ids=["", "nohup"],
)
def test_a_terminal_that_closes_is_a_request_but_under_nohup(
    before: Callable[[], object], signal_taken: int | None
) -> None:
    result = ran(HUNG_UP, before=before)
    assert result.stdout.endswith(f"{signal_taken and int(signal_taken)}\n"), result.stderr


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
    result = ran(TWO_RUNS)
    assert result.returncode == 0, result.stderr


PREEMPTED = """
import os, signal, sys
from common import early_signals
if sys.argv[1] == "early":
    early_signals.note()
    os.kill(os.getpid(), signal.SIGUSR1)
from training.distributed import signals
stop = signals.StopRequest(["SIGUSR1", "SIGHUP"])
for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR1)[sys.argv[1] == "early":]:
    os.kill(os.getpid(), number)
print(stop.preempted, stop.exit_code, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGHUP)
print("still there", stop.exit_code, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("when", ["early", "later"], ids=["while it loads", "once it trains"])
def test_preemption_is_a_request_that_may_be_repeated(when: str) -> None:
    result = ran(PREEMPTED, when)
    code = 128 + signal.SIGUSR1
    assert result.stdout.endswith(f"True {code}\nstill there {code}\n"), result.stderr
    assert result.returncode == 0
