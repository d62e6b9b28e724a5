"""Where a door that no launcher started puts its processes."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
import torch

from tests.launching import topology
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.launch.start import SUPERVISOR, launch
from training.launch.supervisor import JOB

GPUS = 8  # of the machine, however many a user may see


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that only counters see."""

    def count() -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return len(visible.split(",")) if visible else GPUS

    monkeypatch.setattr(torch.cuda, "device_count", count)


def launched(number: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The job that the door hands to its supervisor."""
    found: list[str] = []
    monkeypatch.setattr(os, "execv", lambda _, words: found.extend(words))
    monkeypatch.setenv(JOB, "")
    monkeypatch.setattr(sys, "argv", ["train_ds.py", "--config", "run.yml"])
    keys = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 1}
    launch(TrainConfig.model_validate(keys | {"model_topo": topology((number, 1))}))
    assert found == [sys.executable, "-c", SUPERVISOR, *sys.argv]
    job: dict[str, Any] = json.loads(os.environ[JOB])
    return job


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("visible", [None, "", "7,2,3", "MIG-1,MIG-2", "GPU-5ebe9f43,GPU-ac33420d"])
def test_a_run_takes_the_gpus_that_its_user_chose(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' environment is the user's, in which rank n takes the nth of the GPUs that can be seen."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    job = launched(2, monkeypatch)
    assert job["hosts"] == {"": [0, 1]} and job["environment"] == {}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.usefixtures("machine")
def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="this machine has 2 GPUs"):
        launched(3, monkeypatch)
