"""Check that the GPU and the installed torch can run a config.

Asked before anything is built: torch itself emulates bf16, or leaves TF32 alone, without a word where the GPU has none.
Whether it has kernels for the GPU at all is asked before the ranks meet, as NCCL's first message would end with "no
kernel image is available".
"""

from __future__ import annotations

import re

import torch

from models.block_options import FP8_CAPABILITY, FP8_PACKAGE, torchao_installed
from models.loss.lean import AMPERE
from training.config.keys import TrainConfig
from training.errors import ConfigError

OLDEST_OF_CUDA_13 = (7, 5)


def check_gpu(config: TrainConfig) -> None:
    """Check the GPU, where there is one.

    Raises:
        ConfigError: torch was not built for it, or it does not compute in bf16, TF32 or fp8; torchao is missing.
    """
    if not torch.cuda.is_available():
        if config.fp8.enabled:
            raise ConfigError("fp8.enabled: this machine has no GPU; expected false")
        return
    check_wheel()
    capability = torch.cuda.get_device_capability()
    check_numbers(config, torch.cuda.get_device_name(), capability >= AMPERE, capability >= FP8_CAPABILITY)
    if config.fp8.enabled and not torchao_installed():
        raise ConfigError(f"fp8.enabled: torchao is not installed; expected pip install {FP8_PACKAGE}")


def check_numbers(config: TrainConfig, name: str, ampere: bool, has_fp8: bool) -> None:
    """Refuse numbers in which a GPU of this name does not compute.

    Raises:
        ConfigError: bf16, TF32 or fp8, which it lacks.
    """
    if config.bf16.enabled and not ampere:
        raise ConfigError(f"bf16.enabled: {name} does not compute in bf16; expected fp16")
    if config.tf32 and not ampere:
        raise ConfigError(f"tf32: {name} does not have it; expected false")
    if config.fp8.enabled and not has_fp8:
        raise ConfigError(f"fp8.enabled: {name} is older than Ada and Hopper (sm_89, sm_90); expected false")


def check_wheel() -> None:
    """Check that torch was built for this process's GPU.

    Raises:
        ConfigError: it was not.
    """
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if not has_kernels(capability, torch.cuda.get_arch_list()):
        hint = ", such as one for CUDA 12.6 (cu126)" if capability < OLDEST_OF_CUDA_13 else ""
        raise ConfigError(
            f"torch {torch.__version__} has no kernels for {name} (sm_{capability[0]}{capability[1]}); expected a "
            f"wheel of torch that was built for it{hint}"
        )


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Say whether a GPU runs what torch was built for (`sm_80`, `compute_90`).

    Machine code runs on its own generation, from its own number on; PTX (compute) is compiled for whatever came later.
    """
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built_for)):
        oldest = int(major), int(minor)
        if oldest <= capability and (kind == "compute" or oldest[0] == capability[0]):
            return True
    return False
