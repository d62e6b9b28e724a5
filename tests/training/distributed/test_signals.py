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
