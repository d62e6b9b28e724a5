"""Which attention kernel a run uses, and why.

transformers calls the kernels; all of them are exact and keep packed documents apart. The usual one is torch's own
scaled_dot_product_attention, document by document (`models.attention.packed`), or for some families the layer's own
arithmetic. Others never hold the scores and compute all documents in one launch. They need a GPU from Ampere on, as
Triton and flex attention do, and 16-bit weights. `use_flash_attn: true` takes the first that can run of flash-attn,
where its package is installed, the same algorithm inside torch, and flex attention (`models.attention.flex`). `auto`
takes the fastest of these, of the usual kernel, of cuDNN's and of flash-attn 3 (`options.planner.kernels`). A family
declares which of them compute its attention exactly. Where none can run, the usual kernel does.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from models.attention.flex import FLEX
from models.attention.packed import BY_CUDNN, BY_DOCUMENT, VARLEN

AMPERE = (8, 0)  # the first GPUs that compute in bf16, and give 16-bit products fp32 results
TORCH, CUDNN, FLASH, FLASH_3, EAGER = BY_DOCUMENT, BY_CUDNN, "flash_attention_2", "flash_attention_3", "eager"
ALL = (TORCH, CUDNN, FLASH, FLASH_3, VARLEN, FLEX)  # what computes plain attention and sliding windows
BOTH_WAYS = (TORCH, EAGER)  # what takes the masks of images whose tokens see each other both ways
WITHOUT_DROPOUT = (FLASH_3, VARLEN, FLEX)  # kernels that cannot drop attention weights
DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # the families' names of its rate
NAMES = {
    TORCH: "torch's scaled_dot_product_attention",
    CUDNN: "torch's cuDNN attention",
    FLASH: "flash-attn",
    FLASH_3: "flash-attn 3",
    VARLEN: "torch's varlen_attn",
    FLEX: "torch's flex_attention",
    EAGER: "the layer's own",
}


class AttentionChoice(NamedTuple):
    """A kernel by transformers' name, and the reason for the log."""

    implementation: str
    reason: str


def choose_attention(use_flash_attn: bool, dtype: torch.dtype, exact: tuple[str, ...] = ALL) -> AttentionChoice:
    """Choose the kernel for a run in `dtype` on this machine.

    Args:
        exact: kernels that compute the model's attention exactly, the usual one first.
    """
    usual = exact[0]
    if not use_flash_attn:
        return AttentionChoice(usual, NAMES[usual])
    if obstacle := _device_obstacle(dtype):
        return AttentionChoice(usual, f"{NAMES[usual]}: use_flash_attn is set, but {obstacle}")
    passed_over = ""
    for kernel, missing in ((FLASH, _flash_missing()), (VARLEN, None), (FLEX, _flex_missing())):
        obstacle = missing if kernel in exact else f"{NAMES[kernel]} does not compute this model's attention"
        if obstacle is None:
            return AttentionChoice(kernel, NAMES[kernel] + (passed_over and f": {passed_over}"))
        passed_over += f"; {obstacle}" if passed_over else obstacle
    return AttentionChoice(usual, f"{NAMES[usual]}: use_flash_attn is set, but {passed_over}")


def candidates(dtype: torch.dtype, exact: tuple[str, ...] = ALL) -> list[str]:
    """List the exact kernels that can run here, the usual one first."""
    if _device_obstacle(dtype):
        return [exact[0]]
    able = {
        CUDNN: torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available(),
        FLASH: _flash_missing() is None,
        FLASH_3: is_flash_attn_3_available(),
        FLEX: _flex_missing() is None,
    }
    return [kernel for kernel in exact if able.get(kernel, True)]


def _device_obstacle(dtype: torch.dtype) -> str | None:
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability() < AMPERE:
        return f"{torch.cuda.get_device_name()} is older than flash attention supports"
    if dtype not in (torch.bfloat16, torch.float16):
        return "flash attention computes in bf16 or fp16 only"
    return None


def _flash_missing() -> str | None:
    return None if is_flash_attn_2_available() else "the flash-attn package is not installed (requirements-gpu.txt)"


def _flex_missing() -> str | None:
    return None if importlib.util.find_spec("triton") else "flex_attention needs the triton package"
