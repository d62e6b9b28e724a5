"""Shows which attention kernel is taken, and that the reason is said where it is not the wanted one."""

from __future__ import annotations

import pytest
import torch

from models.attention import EAGER, TORCH, choose_attention


def test_torch_is_taken_unless_flash_is_wanted() -> None:
    assert choose_attention(False, torch.bfloat16).implementation == TORCH


def test_a_family_that_computes_attention_by_itself_keeps_doing_so() -> None:
    choice = choose_attention(True, torch.bfloat16, eager_only=True)
    assert choice.implementation == EAGER
    assert "own" in choice.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_a_machine_without_a_gpu_says_so() -> None:
    choice = choose_attention(True, torch.bfloat16)
    assert choice.implementation == TORCH
    assert "no GPU" in choice.reason


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fp32_is_no_precision_for_flash_attention() -> None:
    choice = choose_attention(True, torch.float32)
    assert choice.implementation == TORCH
    assert "bf16 or fp16" in choice.reason or "older" in choice.reason
