"""Shows which attention kernel is taken, and that the reason is said where it is not the wanted one."""

from __future__ import annotations

import pytest
import torch

from models import attention
from models.attention import EAGER, FLASH, TORCH, choose_attention


def test_torch_is_taken_unless_flash_is_wanted() -> None:
    assert choose_attention(False, torch.bfloat16).implementation == TORCH


@pytest.mark.parametrize("exact", [(EAGER,), (EAGER, FLASH), (TORCH, EAGER), (FLASH,)])
def test_the_usual_kernel_of_a_family_is_taken_unless_flash_is_wanted(exact: tuple[str, ...]) -> None:
    choice = choose_attention(False, torch.bfloat16, exact)
    assert choice.implementation == exact[0]
    assert "use_flash_attn" not in choice.reason


@pytest.mark.parametrize("exact", [(EAGER,), (TORCH, EAGER)])
def test_a_family_that_flash_does_not_compute_keeps_its_usual_kernel(exact: tuple[str, ...]) -> None:
    choice = choose_attention(True, torch.bfloat16, exact)
    assert choice.implementation == exact[0]
    assert "use_flash_attn is set, but flash-attn does not compute this family's attention" in choice.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_is_taken_where_it_can_run(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_flash_obstacle", lambda dtype: None)
    assert choose_attention(True, dtype).implementation == FLASH
    assert choose_attention(True, dtype, (EAGER, FLASH)).implementation == FLASH
    assert choose_attention(True, dtype, (TORCH, EAGER)).implementation == TORCH


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_a_machine_without_a_gpu_says_so() -> None:
    choice = choose_attention(True, torch.bfloat16)
    assert choice.implementation == TORCH
    assert "no GPU" in choice.reason
    assert choose_attention(True, torch.bfloat16, (EAGER, FLASH)).implementation == EAGER


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fp32_is_no_precision_for_flash_attention() -> None:
    choice = choose_attention(True, torch.float32)
    assert choice.implementation == TORCH
    assert "bf16 or fp16" in choice.reason or "older" in choice.reason
