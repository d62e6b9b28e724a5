"""Two runs with one cache that ask the same teacher: one asks it, and its death leaves nothing half."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launching import Launch, start_supervised, supervised, topology, write_config
from tests.training.starts import steps

pytestmark = [pytest.mark.launched, pytest.mark.slow]

MADE, KNOWN = "log-probabilities of the data computed in", "log-probabilities of the data are known"


@pytest.mark.parametrize("end", ["killed", "done"])
def test_of_two_runs_at_once_one_asks_the_teacher(
    end: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    student = make_checkpoint("llama", num_hidden_layers=1)
    teacher = make_checkpoint("llama", num_hidden_layers=4)
    records = [{"text": f"Run {number} has {number % 7} stages."} for number in range(400)]
    (tmp_path / "records.json").write_text(json.dumps(records))

    def config(name: str, cache: str) -> Path:
        return write_config(
            tmp_path / f"{name}.yml",
            model_path=str(student),
            data_path=str(tmp_path / "records.json"),
            distillation={"teacher": str(teacher), "top_k": 8, "weight": 0.9},
            cache_dir=str(tmp_path / cache),
            model_topo=topology((1, 1)),
            max_steps=2,
            tensorboard={"enabled": False},
        )

    alone = supervised(1, "train_ds.py", "--config", config("alone", "cache-alone"))
    assert alone.returncode == 0 and MADE in alone.stdout

    one = start_supervised(1, "train_ds.py", "--config", config("one", "cache"))
    one.until(lambda: begun(tmp_path / "cache"), pause=0.0)
    signal_all(one, signal.SIGSTOP)
    other = start_supervised(1, "train_ds.py", "--config", config("other", "cache"))
    other.until(lambda: "asks it about these records; waiting for it" in other.stdout)
    if end == "killed":
        one.kill()
    else:
        signal_all(one, signal.SIGCONT)
        assert one.end().returncode == 0
    result = other.end()

    assert result.returncode == 0, result.stdout + result.stderr
    assert (MADE if end == "killed" else KNOWN) in result.stdout
    assert [line["loss"] for line in steps(tmp_path / "other").values()] == [
        line["loss"] for line in steps(tmp_path / "alone").values()
    ]
    left = [path.name for path in (tmp_path / "cache").rglob(".teacher-*")]
    assert not left


def begun(cache: Path) -> bool:
    """Whether a teacher's words are being written; other folders of the cache come and go meanwhile."""
    with suppress(FileNotFoundError):
        return any(cache.rglob(".teacher-*.partial-*"))
    return False


def signal_all(launch: Launch, number: int) -> None:
    for process in launch.family():
        process.send_signal(number)
