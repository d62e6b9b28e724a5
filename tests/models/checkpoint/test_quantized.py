"""Shows that checkpoints in 4 and 8 bits are read as transformers reads them, to the bit, and come back in 16."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models import CheckpointError, load_model
from models.checkpoint.quantized import Quantized
from models.checkpoint.tensor_files import TensorInfo
from models.conversion.to_huggingface import pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from tests.models.derived.cases import write_small
from tests.models.helpers import assert_same_bits, change_config, change_weights, error_line, random_ids, read_config

BLOCK = 16  # rows and columns that share a scale; 128 in large models
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def save(folder: Path, tensors: dict[str, Tensor], method: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=method, dtype="bfloat16")


def to_fp8(folder: Path, scales: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Quantize every matrix of the blocks as DeepSeek does; gives what transformers reads in their places."""
    expected: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() != 2 or "layers" not in name or "gate.weight" in name:
            expected[name] = stored[name] = tensor.to(torch.bfloat16)
            continue
        grid = [-(-size // BLOCK) for size in tensor.shape]
        scale = (torch.rand(grid) + 0.5).to(scales)
        if scales == torch.uint8:
            scale = torch.randint(120, 130, grid, dtype=torch.uint8)
        stored[name] = tensor.to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        stored[name.replace(".weight", ".input_scale")] = torch.ones(1)
        if all(size % BLOCK == 0 for size in tensor.shape):
            expected[name] = Fp8Dequantize(None)._dequantize_one(stored[name], scale, torch.bfloat16)
        else:  # which transformers refuses, and DeepSeek's own files have
            factors = scale.float() if scales != torch.uint8 else (scale.float() - 127).exp2()
            rows, columns = tensor.shape
            factors = factors.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
            expected[name] = (stored[name].float() * factors).to(torch.bfloat16)
    save(folder, stored, FP8)
    return expected


def to_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Quantize the experts as gpt-oss does; gives what transformers reads in their places."""
    expected: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            expected[name] = stored[name] = tensor.to(torch.bfloat16)
            continue
        experts, inner, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 125, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save(folder, stored, MXFP4)
    return expected


SIZES = {"hidden_size": 4096, "intermediate_size": 4096}  # which become multiples of 32
QUANTIZED: dict[str, tuple[str, dict[str, int], Callable[[Path], dict[str, Tensor]]]] = {
    "fp8": ("deepseek_v3", {}, to_fp8),
    "fp8, scales of 8 bits": ("qwen3_moe", {}, lambda folder: to_fp8(folder, torch.uint8)),
    "mxfp4": ("gpt_oss", SIZES, to_mxfp4),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_weights_are_transformers_own_and_come_back_in_16_bits(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_type, sizes, quantize = QUANTIZED[kind]
    write_small(tmp_path / "model", model_type, **sizes)
    expected = quantize(tmp_path / "model")
    with caplog.at_level("INFO", "pipetune"):
        hg_to_pp(tmp_path / "model", tmp_path / "layers", verify=True)
    assert caplog.text.count("quantized weights are read as what they stand for") == 1
    pp_to_hg(tmp_path / "layers", tmp_path / "back")
    assert_same_bits(load_file(tmp_path / "back" / "model.safetensors"), expected)
    assert "quantization_config" not in read_config(tmp_path / "back")
    ids = random_ids(1, 12)
    with torch.inference_mode():
        direct, converted = (load_model(tmp_path / name)(ids) for name in ("model", "layers"))
    torch.testing.assert_close(direct, converted, atol=0, rtol=0)


@pytest.mark.parametrize("grid", [(), (1,), (1, 1), (3, 2), (6, 4), (48, 1), (24, 32)], ids=str)
def test_scales_of_other_blocks_than_the_named_ones_count_as_in_transformers(grid: tuple[int, ...]) -> None:
    tensors = {"w": torch.randn(48, 32).to(torch.float8_e4m3fn), "s": torch.rand(grid) + 0.5}
    found = Quantized("w", "s", torch.bfloat16, (BLOCK, BLOCK), "folder").read(tensors.__getitem__)
    assert torch.equal(found, Fp8Dequantize(None)._dequantize_one(tensors["w"], tensors["s"], torch.bfloat16))


FP8_FORM, MXFP4_FORM = (torch.float8_e4m3fn, (BLOCK, BLOCK), " in blocks of [16, 16]"), (torch.uint8, None, "")
MISFITS: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = [
    (FP8_FORM, (48, 32), grid) for grid in [(3,), (3, 3), (5, 2), (96, 64), (0, 2), (2, 3, 2)]
]
MISFITS += [(FP8_FORM, (48,), (1,)), (MXFP4_FORM, (4, 8, 2, 16), (4, 8, 1)), (MXFP4_FORM, (32, 16), (4, 8, 1))]


@pytest.mark.parametrize(("form", "numbers", "scales"), MISFITS, ids=str)
def test_scales_that_do_not_fit_are_refused(form: Any, numbers: tuple[int, ...], scales: tuple[int, ...]) -> None:
    dtype, block, blocks = form
    infos = (TensorInfo(dtype, torch.Size(shape)) for shape in (numbers, scales))
    expected = f"folder: w: scales {list(scales)} do not fit {list(numbers)}{blocks}"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        Quantized("w", "s", torch.bfloat16, block, "folder").info(*infos)


def test_quantized_weights_without_scales_and_integers_are_refused(tmp_path: Path) -> None:
    query, experts = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.down_proj"
    write_small(tmp_path / "integers", "qwen3_moe")
    change_weights(tmp_path / "integers", lambda tensors: tensors.update({query: tensors[query].to(torch.int8)}))
    assert f"{query} has 8 bits and no scales" in error_line(lambda: load_model(tmp_path / "integers"))
    for kind, scales, line in (
        ("fp8", f"{query}_scale_inv", f"{query} has 8 bits and no scales"),
        ("mxfp4", f"{experts}_scales", f"unexpected weights for gpt_oss: {experts}_blocks"),
    ):
        model_type, sizes, quantize = QUANTIZED[kind]
        write_small(tmp_path / kind, "qwen3_moe" if kind == "fp8" else model_type, **sizes)
        quantize(tmp_path / kind)
        change_weights(tmp_path / kind, methodcaller("pop", scales))
        assert line in error_line(partial(load_model, tmp_path / kind))


OF_BLOCKS = "expected the rows and columns that share a scale"
BAD: dict[str, tuple[Any, str]] = {
    "method": ({"quant_method": "gptq"}, "quantized by gptq; expected 16 or 32 bits, fp8 or mxfp4"),
    "no method": ({"load_in_8bit": True, "load_in_4bit": False}, "quantized by load_in_8bit; expected 16"),
    "a word": ("fp8", "quantization_config: expected an object, found 'fp8'"),
    "no block": (FP8 | {"weight_block_size": None}, f"fp8 with weight_block_size None; {OF_BLOCKS}"),
    "empty blocks": (FP8 | {"weight_block_size": [0, 0]}, f"fp8 with weight_block_size [0, 0]; {OF_BLOCKS}"),
    "words": (FP8 | {"weight_block_size": ["16", "16"]}, f"fp8 with weight_block_size ['16', '16']; {OF_BLOCKS}"),
    "fractions": (FP8 | {"weight_block_size": [16.0, 16]}, f"fp8 with weight_block_size [16.0, 16]; {OF_BLOCKS}"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    method, expected = BAD[name]
    write_small(tmp_path, "qwen3_moe")
    change_config(tmp_path, quantization_config=method)
    assert expected in error_line(lambda: load_model(tmp_path))
