"""Set and describe the rounding of products and the order of sums: `deterministic`, `tf32`, `fp8`.

Kernels with atomic additions, such as flash attention's backward pass, sum in a new order each time. So on a GPU a
resumed run is equal to the last bit only with `deterministic: true`: torch then uses ordered kernels, and refuses
operations that have none. It slows attention's backward pass. On a CPU all kernels are ordered.

TF32 keeps 10 bits of the factors of an fp32 product and sums in fp32, on tensor cores. Rotary angles are never computed
in TF32 (`models.attention.positions`).
"""

from __future__ import annotations

import os

import torch

from models.attention.kernels import AMPERE
from training.config.keys import TrainConfig
from training.config.precision import training_dtype
from training.metrics.devices import cpu_has_bf16, this_device

WORTH = 1.5  # speed-up over fp32 from which the log suggests TF32


def set_numerics(config: TrainConfig) -> None:
    """Set this process up; call it before the first product on a GPU, when cuBLAS reads its variable."""
    if config.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it torch refuses every product
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers passes it to the flash-attn package
        # Filling new memory with NaN helps debugging, and takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(config.deterministic)
    torch.set_float32_matmul_precision("high" if config.tf32 and torch.cuda.is_available() else "highest")


def describe_numerics(config: TrainConfig) -> list[str]:
    """Describe these settings in lines for the log."""
    lines, dtype = [], training_dtype(config)
    if config.deterministic:
        cost = "; attention's backward pass is slower for it" if torch.cuda.is_available() else ""
        lines.append(f"deterministic: sums have one order, so a resumed run is equal to the last bit{cost}")
    for name, share in (("bf16", 256), ("fp16", 2048)):
        if getattr(getattr(config, name), key := f"{name}_master_weights_and_grads"):
            lost = f"the weights are kept in {name}, so updates below 1/{share} of a weight are lost"
            lines.append(f"warning: {name}.{key}: {lost}; leave it out for fp32 masters")
    if not torch.cuda.is_available():
        lines.append(f"threads: {torch.get_num_threads()}")
        if config.tf32:
            lines.append("warning: tf32 is without effect, as there is no GPU")
        if dtype is torch.bfloat16 and not cpu_has_bf16():
            lines.append("warning: this CPU has no instructions for bf16, which takes it ten times as long as fp32")
    elif config.fp8.enabled:
        lines.append("products: fp8 in the blocks' linear layers, bf16 elsewhere; weights and their gradients are bf16")
    elif config.tf32:
        lines.append("products: TF32, with 10 bits of each factor")
    elif dtype is torch.float32 and torch.cuda.get_device_capability() >= AMPERE:
        device = this_device()
        if (times := device.half / 2 / device.single) >= WORTH:  # at half the rate of 16-bit numbers
            lines.append(f"products: fp32; with tf32: true they are up to {times:.0f} times as fast, and have 10 bits")
    return lines
