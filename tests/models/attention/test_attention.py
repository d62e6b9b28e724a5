"""Shows which attention kernel is taken, and that the reason is said where it is not the wanted one."""

from __future__ import annotations

import pytest
import torch

from models.attention import kernels
from models.attention.kernels import (
    ALL,
    CUDNN,
    EAGER,
    FLASH,
    FLASH_3,
    FLEX,
    TORCH,
    VARLEN,
    candidates,
    choose_attention,
)

GEMMA2, BLOOM = (EAGER, FLASH, FLEX), (EAGER, FLEX)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a GPU, where a test says what is missing."""
    monkeypatch.setattr(kernels, "_device_obstacle", lambda dtype: None)
    for name in ("_flash_missing", "_flex_missing"):
        monkeypatch.setattr(kernels, name, lambda: None)
    return monkeypatch


@pytest.mark.parametrize("exact", [ALL, BLOOM, GEMMA2, (TORCH, EAGER)])
def test_the_usual_kernel_of_a_family_is_taken_unless_flash_is_wanted(exact: tuple[str, ...]) -> None:
    choice = choose_attention(False, torch.bfloat16, exact)
    assert choice.implementation == exact[0]
    assert "use_flash_attn" not in choice.reason


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("exact", "taken"), [(ALL, FLASH), (GEMMA2, FLASH), (BLOOM, FLEX), ((TORCH, VARLEN), VARLEN), ((TORCH,), TORCH)]
)
def test_the_first_kernel_that_is_exact_is_taken(exact: tuple[str, ...], taken: str) -> None:
    assert choose_attention(True, torch.bfloat16, exact).implementation == taken


@pytest.mark.parametrize(
    ("exact", "missing", "taken", "told"),
    [
        (ALL, ["flash"], VARLEN, ["torch's varlen_attn: ", "flash-attn package is not installed"]),
        ((TORCH, FLASH, FLEX), ["flash", "flex"], TORCH, ["use_flash_attn is set, but", "not installed", "triton"]),
        (GEMMA2, ["flash"], FLEX, ["torch's flex_attention: ", "varlen_attn does not compute this model's attention"]),
        (BLOOM, ["flex"], EAGER, ["use_flash_attn is set, but", "flash-attn does not compute", "triton"]),
    ],
)
def test_what_is_passed_over_is_said(
    exact: tuple[str, ...], missing: list[str], taken: str, told: list[str], machine: pytest.MonkeyPatch
) -> None:
    machine.undo()
    machine.setattr(kernels, "_device_obstacle", lambda dtype: None)
    machine.setattr(kernels, "is_flash_attn_2_available", lambda: "flash" not in missing)
    machine.setattr(kernels.importlib.util, "find_spec", lambda name: None if "flex" in missing else name)
    choice = choose_attention(True, torch.bfloat16, exact)
    assert choice.implementation == taken
    for words in told:
        assert words in choice.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
@pytest.mark.parametrize("exact", [ALL, GEMMA2, BLOOM])
def test_a_machine_without_a_gpu_says_so(exact: tuple[str, ...]) -> None:
    choice = choose_attention(True, torch.bfloat16, exact)
    assert choice.implementation == exact[0]
    assert choice.reason.endswith("use_flash_attn is set, but there is no GPU")


@pytest.mark.parametrize(
    ("capability", "dtype", "told"),
    [((7, 0), torch.float16, "older than"), ((8, 0), torch.float32, "bf16 or fp16"), ((9, 0), torch.bfloat16, None)],
)
def test_old_gpus_and_fp32_are_obstacles(
    capability: tuple[int, int], dtype: torch.dtype, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    obstacle = kernels._device_obstacle(dtype)
    assert obstacle is None if told is None else told in (obstacle or "")


@pytest.mark.parametrize(
    ("exact", "able", "tried"),
    [
        (ALL, {FLASH_3, CUDNN}, [TORCH, CUDNN, FLASH, FLASH_3, VARLEN, FLEX]),
        (ALL, set(), [TORCH, FLASH, VARLEN, FLEX]),
        (BLOOM, {FLASH_3, CUDNN}, [EAGER, FLEX]),
    ],
)
def test_what_is_tried_is_exact_and_there(
    exact: tuple[str, ...], able: set[str], tried: list[str], machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(kernels, "is_flash_attn_3_available", lambda: FLASH_3 in able)
    machine.setattr(torch.backends.cudnn, "is_available", lambda: CUDNN in able)
    assert candidates(torch.bfloat16, exact) == tried


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is tried without a GPU")
def test_without_a_gpu_nothing_is_tried() -> None:
    assert candidates(torch.bfloat16) == [TORCH]
