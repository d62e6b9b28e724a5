"""Which GPUs can run a config; torch is made to see a GPU, none is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.block_options import FP8_PACKAGE
from tests.conftest import FAQ
from tests.launching import error_lines, run, topology, write_config
from training.config.gpu import check_gpu, has_kernels
from training.config.keys import TrainConfig
from training.errors import ConfigError

KEYS = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8}
BF16 = TrainConfig.model_validate(KEYS | {"bf16": {"enabled": True}})
FP16 = TrainConfig.model_validate(KEYS | {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}})
CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120".split()
CUDA_12 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90".split()
# A machine with two V100s and a torch that has nothing for them, on which NCCL fails at once.
ON_V100S = f"""
import torch
import train_ds

def fail(*_, **__):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

answers = dict(is_available=True, device_count=2, set_device=None, get_device_name="Tesla V100-SXM2-32GB")
answers |= dict(get_device_capability=(7, 0), get_arch_list={CUDA_13})
for name, answer in answers.items():
    setattr(torch.cuda, name, lambda *_, answer=answer: answer)
torch.distributed.init_process_group = fail
train_ds.main()
"""


def be(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], built_for: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)


@pytest.mark.slow
@pytest.mark.launched
def test_a_start_on_v100s_ends_before_nccl_fails(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    keys = {"model_path": str(make_checkpoint("llama")), "data_path": str(FAQ), "model_topo": topology((2, 1))}
    (script := tmp_path / "on_v100s.py").write_text(ON_V100S, encoding="utf-8")
    config = write_config(tmp_path / "run.yml", **keys)
    result = run(sys.executable, script, "--config", config, DS_ACCELERATOR="cuda")
    assert result.returncode == 2, result.stdout + result.stderr
    (line,) = error_lines(result)
    assert "has no kernels for Tesla V100" in line and "CUDA 12.6 (cu126)" in line
    assert "Traceback" not in result.stderr


V100, A100 = ("Tesla V100-SXM2-32GB", (7, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0))
L40S, H100 = ("NVIDIA L40S", (8, 9)), ("NVIDIA H100 80GB HBM3", (9, 0))
TF32 = TrainConfig.model_validate(KEYS | {"tf32": True})
FP8 = TrainConfig.model_validate(KEYS | {"bf16": {"enabled": True}, "fp8": {"enabled": True}})


@pytest.mark.parametrize(
    ("gpu", "built_for", "config", "line"),
    [
        (V100, CUDA_13, FP16, r"has no kernels for Tesla V100.* \(sm_70\); .* CUDA 12.6 \(cu126\)"),
        (V100, CUDA_12, FP16, None),
        (V100, CUDA_12, BF16, r"^bf16\.enabled: Tesla V100.* expected fp16$"),
        (V100, CUDA_12, TF32, r"^tf32: Tesla V100.* expected false$"),
        (A100, CUDA_13, FP16, None),
        (A100, CUDA_13, BF16, None),
        (A100, CUDA_13, FP8, r"^fp8.enabled: NVIDIA A100.* is older than Ada and Hopper .* expected false$"),
        (L40S, CUDA_13, FP8, None),
        (H100, CUDA_13, FP8, None),
    ],
)
def test_what_each_gpu_computes_in(
    gpu: tuple[str, tuple[int, int]],
    built_for: list[str],
    config: TrainConfig,
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be(monkeypatch, *gpu, built_for)
    if line:
        with pytest.raises(ConfigError, match=line):
            check_gpu(config)
    else:
        check_gpu(config)


def test_fp8_needs_torchao_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, *H100, CUDA_13)
    monkeypatch.setattr("training.config.gpu.torchao_installed", lambda: False)
    with pytest.raises(ConfigError, match=rf"^fp8.enabled: torchao is not installed; .* pip install {FP8_PACKAGE}$"):
        check_gpu(FP8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^fp8.enabled: this machine has no GPU; expected false$"):
        check_gpu(FP8)


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((8, 9), ["sm_80"], True),  # a later one of the same generation
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((9, 0), ["sm_90a"], True),
        ((7, 0), ["sm_75", "compute_75"], False),
        ((12, 0), ["sm_120"], True),
        ((10, 3), ["sm_100"], True),
    ],
)
def test_which_kernels_run_where(capability: tuple[int, int], built_for: list[str], runs: bool) -> None:
    assert has_kernels(capability, built_for) == runs
