"""Where a door that no launcher started puts its processes."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.launcher import runner

from tests.launching import topology
from training.config.sections import ModelTopo
from training.distributed import processes
from training.errors import ConfigError

GPUS = 8  # of the machine, however many a user may see


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that only counters see."""

    def count() -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return len(visible.split(",")) if visible else GPUS

    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(get_accelerator(), "device_count", count)


def launched(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that the door becomes."""
    found: list[str] = []
    monkeypatch.setattr(os, "execv", lambda _, words: found.extend(words))
    processes.launch(ModelTopo.model_validate(topology((number, 1))), ["train_ds.py", "--config", "run.yml"])
    return found


def gpus_of(command: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that DeepSpeed's own launcher then gives to the ranks."""
    told: list[list[str]] = []

    class Started:
        returncode = 0

        def __init__(self, words: list[str], **_: Any) -> None:
            told.append(words)

        def wait(self) -> None:
            pass

    monkeypatch.setattr(runner.subprocess, "Popen", Started)
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    runner.main(command[command.index("deepspeed.launcher.runner") + 1 :])
    (words,) = told
    coded = next(word.partition("=")[2] for word in words if word.startswith("--world_info="))
    world: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(coded))
    return world["localhost"]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("visible", "expected"), [(None, [0, 1]), ("", [0, 1]), ("4,5", [4, 5]), ("7,2,3", [2, 7])])
def test_a_run_takes_the_gpus_that_its_user_chose(
    visible: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    command = launched(2, monkeypatch)
    assert gpus_of(command, monkeypatch) == expected
    assert command[-3:] == ["train_ds.py", "--config", "run.yml"]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("visible", ["MIG-1,MIG-2", "GPU-5ebe9f43,GPU-ac33420d"])
def test_slices_of_a_gpu_and_serial_numbers_stay_as_they_are(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's launcher leaves the environment alone, and rank n takes the nth of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    command = launched(2, monkeypatch)
    assert command[2] == "torch.distributed.run"
    assert command[command.index("--nproc_per_node") + 1] == "2"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.usefixtures("machine")
def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="this machine has 2 GPUs"):
        launched(3, monkeypatch)
