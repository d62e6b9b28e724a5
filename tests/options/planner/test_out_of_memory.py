"""What is said when memory runs out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from options.planner import resources
from options.planner.inputs import Basis, Workload
from options.planner.plan import Plan
from options.planner.resources import explain_out_of_memory
from tests.options.planner.helpers import config_of, llama
from training.errors import ConfigError
from training.metrics import devices
from training.metrics.devices import GIB, parse_devices

ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.06 GiB is free."
)
PARTS = [17, 17]


def error_line(folder: Path, error: BaseException, stage: int = 1, parts: list[int] = PARTS) -> str:
    """The line for llama-7b in two stages."""
    config = config_of(folder, 2, use_grad_ckpt=False, train_micro_batch_size_per_gpu=4).with_parts(parts)
    with pytest.raises(ConfigError) as caught, explain_out_of_memory(config, llama(folder), stage, None):
        raise error
    return str(caught.value)


def test_an_allocation_that_fails_is_told_with_the_plan_and_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60)
    line = error_line(tmp_path, failed.value)
    planned, advised = map(float, re.findall(r"says ([\d.]+) GB", line))
    assert line.startswith("out of memory: stage 1 had at most ") and f"asked for {4 * 2**60 / 1e9:.2f} GB" in line
    assert "next: train_micro_batch_size_per_gpu: 1, with which it says" in line
    assert advised < planned


def test_on_a_gpu_its_size_is_told_and_the_plan_is_one_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = parse_devices("H100")[1]
    properties = type("Properties", (), {"total_memory": 80 * GIB})
    for name, value in (
        ("is_available", True),
        ("current_device", 0),
        ("get_device_name", "NVIDIA H100 80GB HBM3"),
        ("get_device_properties", properties),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(devices, "this_device", lambda: gpu)
    monkeypatch.setattr(resources, "this_device", lambda: gpu)
    line = error_line(tmp_path, torch.OutOfMemoryError(ON_A_GPU), stage=0)
    assert "of the 85.90 GB of NVIDIA H100 80GB HBM3, and asked for 1.61 GB; --plan says" in line
    config = config_of(tmp_path, 2, use_grad_ckpt=False, train_micro_batch_size_per_gpu=4)
    plan = Plan(Basis(config, llama(tmp_path), Workload.assumed(config), gpu), PARTS)
    assert f"--plan says {plan.stages[0].memory.peak / 1e9:.2f} GB" in line


def test_plain_zero_has_no_plan(tmp_path: Path) -> None:
    assert error_line(tmp_path, torch.OutOfMemoryError(ON_A_GPU), parts=[]).endswith("asked for 1.61 GB")


@pytest.mark.parametrize("error", [RuntimeError("the third step breaks"), MemoryError(), KeyError("allocate")])
def test_other_errors_are_left_as_they_are(error: BaseException, tmp_path: Path) -> None:
    memory = explain_out_of_memory(config_of(tmp_path, 2).with_parts(PARTS), llama(tmp_path), 0, None)
    with pytest.raises(type(error)) as caught, memory:
        raise error
    assert caught.value is error
