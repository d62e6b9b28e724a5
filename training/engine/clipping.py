"""Clip gradients inside the update, without a pass over them.

DeepSpeed and torch multiply each gradient by a factor, which moves 8 bytes per parameter, and the update reads it
again. torch's fused AdamW and Adam kernels can divide by `grad_scale` as they read, and write the result back: 4 bytes.
A division rounds once, an inverse and a product twice, so an update may differ in the gradient's last bit. The fp16
loss scale is divided out in the same pass. Other optimizers get multiplied gradients, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

ROUNDING = 1e-6  # DeepSpeed and torch add it to the norm


def clip(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], most: float, norm: Tensor) -> None:
    """Clip the gradients of `weights` to the norm `most`, in the optimizer's next step if it is fused, else now."""
    if optimizer.defaults.get("fused"):
        _divide(optimizer, (norm + ROUNDING) / most)
    else:
        nn.utils.clip_grads_with_norm_(weights, most, norm)


def clip_in_update(optimizer: Any) -> None:
    """Make DeepSpeed's bf16 or ZeRO 1 and 2 optimizer clip in its update."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is None or not inner.defaults.get("fused"):
        return
    if isinstance(optimizer, BF16_Optimizer):
        gradients = optimizer.get_grads_for_norm

        def for_norm(for_clipping: bool = False) -> Any:
            if not for_clipping:
                return gradients()
            _divide(inner, (optimizer._global_grad_norm + ROUNDING) / optimizer.clip_grad)
            return []  # nothing left for DeepSpeed to multiply

        optimizer.get_grads_for_norm = for_norm
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):

        def unscale(_: Any, norm: Tensor) -> None:
            _divide(inner, (norm / optimizer.loss_scale + ROUNDING) / optimizer.clip_grad, optimizer.loss_scale)

        optimizer.unscale_and_clip_grads = unscale


def _divide(optimizer: torch.optim.Optimizer, excess: Tensor, scale: float = 1.0) -> None:
    """Make the next step divide gradients by `scale` and, if above 1, by `excess` (norm over its limit)."""
    divisor = excess.clamp(min=1.0) * scale
    # No extra synchronization: the host has waited for the norm already.
    optimizer.grad_scale = divisor if divisor != 1 else None  # type: ignore[attr-defined]
