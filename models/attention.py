"""Which attention kernel a run uses, and why.

transformers calls the kernels; all of them are exact and keep packed documents apart. `use_flash_attn: true` asks for
the flash-attn package, which needs a GPU from Ampere on and 16-bit weights; where it cannot run, torch's own
scaled_dot_product_attention is taken, document by document (`models.document_attention`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers.utils import is_flash_attn_2_available

from models.document_attention import BY_DOCUMENT

TORCH, FLASH, EAGER = BY_DOCUMENT, "flash_attention_2", "eager"
AMPERE = (8, 0)
_NAMES = {TORCH: "torch's scaled_dot_product_attention", FLASH: "flash-attn", EAGER: "the layer's own"}


class AttentionChoice(NamedTuple):
    """The name that transformers knows the kernel by, and a few words for the log."""

    implementation: str
    reason: str


def choose_attention(
    use_flash_attn: bool, dtype: torch.dtype, exact: tuple[str, ...] = (TORCH, FLASH)
) -> AttentionChoice:
    """The kernel for a run in `dtype` on this machine.

    Args:
        exact: the kernels that compute a family's attention exactly, the usual one first.
    """
    usual = exact[0]
    if not use_flash_attn:
        return AttentionChoice(usual, _NAMES[usual])
    obstacle = _flash_obstacle(dtype) if FLASH in exact else "flash-attn does not compute this family's attention"
    if obstacle is None:
        return AttentionChoice(FLASH, _NAMES[FLASH])
    return AttentionChoice(usual, f"{_NAMES[usual]}: use_flash_attn is set, but {obstacle}")


def _flash_obstacle(dtype: torch.dtype) -> str | None:
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability() < AMPERE:
        return f"{torch.cuda.get_device_name()} is older than flash-attn supports"
    if dtype not in (torch.bfloat16, torch.float16):
        return "flash-attn computes in bf16 or fp16 only"
    if not is_flash_attn_2_available():
        return "the flash-attn package is not installed (requirements-gpu.txt)"
    return None
