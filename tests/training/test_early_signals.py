"""A signal in the first moments of a door, while it still imports."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import FAQ
from tests.launching import start, write_config
from training.distributed.processes import free_port

TOLD = "stopped before step 1 of this start: this start trained nothing"


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own, as Linux says."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        (caught,) = (line.split()[1] for line in status if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


@pytest.mark.parametrize("rank", ["0", None], ids=["rank", "launches"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_in_the_imports_ends_in_a_line(number: signal.Signals, rank: str | None, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yml", model_path="m", data_path=str(FAQ))
    place = {"RANK": rank, "WORLD_SIZE": "1", "LOCAL_RANK": "0"} if rank else {}
    launch = start(sys.executable, "train_ds.py", "--config", config, **place)
    launch.until(lambda: catches(launch.pid, number) and catches(launch.pid, signal.SIGUSR1), pause=0.0)
    launch.family()[0].send_signal(number)
    result = launch.end()
    assert (result.returncode, result.stderr) == (128 + number, "")
    assert TOLD in result.stdout


@pytest.mark.launched
def test_a_preemption_in_the_imports_is_heeded_before_the_first_step(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_checkpoint("llama")
    config = write_config(tmp_path / "run.yml", model_path=str(model), data_path=str(FAQ), max_steps=2)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(free_port())
    launch = start(sys.executable, "train_ds.py", "--config", config, **place)
    launch.until(lambda: catches(launch.pid, signal.SIGUSR1), pause=0.0)
    launch.family()[0].send_signal(signal.SIGUSR1)
    result = launch.end()
    assert result.returncode == 128 + signal.SIGUSR1, result.stdout + result.stderr
    assert "stopped before step 1 of 2: this start trained nothing" in result.stdout
