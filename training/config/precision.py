"""Sections of a config for the number formats that a run computes in, and what torch calls its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from training.config.section import Section

if TYPE_CHECKING:
    import torch

    from training.config.keys import TrainConfig


class BF16(Section):
    """`bf16`, passed to DeepSpeed, which decides what is absent."""

    enabled: bool = False
    """Compute in bf16 and keep fp32 copies of the weights; at most one of bf16 and fp16. With neither the run is in
    fp32."""

    immediate_grad_update: bool | None = None
    """DeepSpeed's own; always on."""

    check_grad_overflow: bool | None = None
    """DeepSpeed's own; always on."""

    bf16_master_weights_and_grads: bool | None = None
    """DeepSpeed's own: keep the weights of the optimizer in bf16 too."""

    bf16_optimizer_states: bool | None = None
    """DeepSpeed's own: keep the states of the optimizer in bf16 too."""


class FP16(Section):
    """`fp16`, passed to DeepSpeed, which decides what is absent."""

    enabled: bool = False
    """Compute in fp16 and keep fp32 copies of the weights; for GPUs without bf16, such as V100 and T4; not with ZeRO
    stage 0, unless the weights lie in host memory."""

    auto_cast: bool | None = None
    """DeepSpeed's own; no effect here."""

    fused_optimizer: bool | None = None
    """gdGPT's; no effect here."""

    loss_scale: float | None = Field(default=None, ge=0)
    """DeepSpeed's own: a fixed loss scale; 0, or without the key, a dynamic one."""

    initial_scale_power: int | None = Field(default=None, le=127)
    """DeepSpeed's own: the dynamic loss scale begins at two to the power of this."""

    loss_scale_window: int | None = Field(default=None, gt=0)
    """DeepSpeed's own: after so many steps without an overflow the loss scale is doubled."""

    hysteresis: int | None = None
    """DeepSpeed's own: after so many overflows the loss scale is halved."""

    consecutive_hysteresis: bool | None = None
    """DeepSpeed's own: a step without an overflow starts that count anew."""

    min_loss_scale: int | None = Field(default=None, gt=0)
    """DeepSpeed's own: where the loss scale stops falling."""

    fp16_master_weights_and_grads: bool | None = None
    """DeepSpeed's own: keep the weights of the optimizer in fp16 too."""


Precision = Literal["fp32", "bf16", "fp16"]


class DataTypes(Section):
    """`data_types`, passed to DeepSpeed."""

    grad_accum_dtype: Precision
    """DeepSpeed's own: the dtype in which gradients are summed, `fp32`, `bf16` or `fp16`."""


class FP8(Section):
    """`fp8`: products of the blocks' linear layers in 8 bits (`models.block_options`)."""

    enabled: bool = False
    """In a bf16 run: the products of the blocks' linear layers in fp8, by torchao (`pip install torchao==0.18.0`), on
    GPUs from Ada and Hopper on. Faster where blocks are compiled and layers are wide (docs/performance.md#fp8);
    coarser: 3 bits after the leading one, 2 for gradients, while sums, weights, checkpoints and exports stay those of a
    bf16 run. Not with experts, a `model` axis, ZeRO stage 3, `dualpipev`, or layers whose sizes are no multiples of
    16."""


def training_dtype(config: TrainConfig) -> torch.dtype:
    """Return bf16 or fp16 where the config enables it, else fp32."""
    import torch  # takes seconds, and a config is read without it

    if config.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.fp16.enabled else torch.float32
