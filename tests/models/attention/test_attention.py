"""The choice of an attention kernel, and its reason in the log."""

from __future__ import annotations

import pytest
import torch

from models.attention import kernels
from models.attention.kernels import ALL, CUDNN, EAGER, FLASH, FLASH_3, FLEX, TORCH, candidates, choose_attention
from models.attention.packed import VARLEN

GEMMA2, BLOOM = (EAGER, FLASH, FLEX), (EAGER, FLEX)


@pytest.mark.parametrize(
    ("exact", "missing", "taken", "told"),
    [
        (ALL, [], FLASH, []),
        (GEMMA2, [], FLASH, []),
        (BLOOM, [], FLEX, []),
        ((TORCH, VARLEN), [], VARLEN, []),
        ((TORCH,), [], TORCH, []),
        (ALL, ["flash"], VARLEN, ["torch's varlen_attn: ", "flash-attn package is not installed"]),
        ((TORCH, FLASH, FLEX), ["flash", "flex"], TORCH, ["use_flash_attn is set, but", "not installed", "triton"]),
        (GEMMA2, ["flash"], FLEX, ["torch's flex_attention: ", "varlen_attn does not compute this model's attention"]),
        (BLOOM, ["flex"], EAGER, ["use_flash_attn is set, but", "flash-attn does not compute", "triton"]),
    ],
)
def test_the_first_exact_kernel_is_taken_and_the_log_says_why_not_another(
    exact: tuple[str, ...], missing: list[str], taken: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_device_obstacle", lambda dtype: None)
    monkeypatch.setattr(kernels, "is_flash_attn_2_available", lambda: "flash" not in missing)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None if "flex" in missing else name)
    choice = choose_attention(True, torch.bfloat16, exact)
    assert choice.implementation == taken
    for words in told:
        assert words in choice.reason
    default = choose_attention(False, torch.bfloat16, exact)
    assert default.implementation == exact[0]
    assert "use_flash_attn" not in default.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
@pytest.mark.parametrize("exact", [ALL, GEMMA2, BLOOM])
def test_a_machine_without_a_gpu_takes_the_default(exact: tuple[str, ...]) -> None:
    choice = choose_attention(True, torch.bfloat16, exact)
    assert choice.implementation == exact[0]
    assert choice.reason.endswith("use_flash_attn is set, but there is no GPU")
    assert candidates(torch.bfloat16, exact) == [exact[0]]


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
def test_auto_tries_the_exact_kernels_that_can_run(
    exact: tuple[str, ...], able: set[str], tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_device_obstacle", "_flash_missing", "_flex_missing"):
        monkeypatch.setattr(kernels, name, lambda *_: None)
    monkeypatch.setattr(kernels, "is_flash_attn_3_available", lambda: FLASH_3 in able)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: CUDNN in able)
    assert candidates(torch.bfloat16, exact) == tried
