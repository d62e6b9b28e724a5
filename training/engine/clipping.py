"""Clipping is a part of the update: no pass over the gradients of its own.

DeepSpeed and torch multiply each gradient by what clips it, 8 bytes a parameter, and the update reads it again. torch's
fused kernels of AdamW and Adam divide what they read by `grad_scale`, and write it back: 4 bytes. Dividing rounds once
where inverting and multiplying round twice, so an update may differ in the last bit of the gradient. fp16's loss scale
goes along. Where nothing is to be clipped, nothing is divided. Other optimizers get multiplied gradients, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

ROUNDING = 1e-6  # is added to the norm, by DeepSpeed as by torch


def clip(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], most: float, norm: Tensor) -> None:
    """Clip the gradients of `weights`, whose norm is known, in the next step of torch's optimizer or at once."""
    if optimizer.defaults.get("fused"):
        _divide(optimizer, (norm + ROUNDING) / most)
    else:
        nn.utils.clip_grads_with_norm_(weights, most, norm)


def clip_in_update(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer for bf16, or that of ZeRO's stages 1 and 2, clip so."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is None or not inner.defaults.get("fused"):
        return
    if isinstance(optimizer, BF16_Optimizer):
        gradients = optimizer.get_grads_for_norm

        def for_norm(for_clipping: bool = False) -> Any:
            if not for_clipping:
                return gradients()
            _divide(inner, (optimizer._global_grad_norm + ROUNDING) / optimizer.clip_grad)
            return []  # is left to multiply

        optimizer.get_grads_for_norm = for_norm
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):

        def unscale(_: Any, norm: Tensor) -> None:
            _divide(inner, (norm / optimizer.loss_scale + ROUNDING) / optimizer.clip_grad, optimizer.loss_scale)

        optimizer.unscale_and_clip_grads = unscale


def _divide(optimizer: torch.optim.Optimizer, excess: Tensor, scale: float = 1.0) -> None:
    """Let the next step divide gradients by `scale`, and by how often they are as long as they may be."""
    divisor = excess.clamp(min=1.0) * scale
    # The host has waited for the norm already.
    optimizer.grad_scale = divisor if divisor != 1 else None  # type: ignore[attr-defined]
