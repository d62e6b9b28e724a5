"""What autograd saves of a layer by the count on fake tensors, against a real pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from models.api import read_spec
from models.costs import LayerCase, saved_by
from models.layers import Block, Head
from models.spec import ModelSpec
from models.weight_gradients import WeightGradients
from tests.conftest import BAICHUAN, CHATGLM, TINY

FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: {**TINY, "model_type": name, "n_head": 4}
        for name in ("llama", "bloom", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4")
    },
    "baichuan": BAICHUAN,
    "chatglm": CHATGLM,
}


def spec_of(folder: Path, fields: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return read_spec(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_are_those_of_a_real_pass(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec, rows, length = spec_of(tmp_path, FAMILIES[family]), 2, 40
    positions = spec.positions()
    ids = torch.arange(length).repeat(rows, 1)
    for layer in (1, spec.n_layers - 1):
        module = spec.build(layer, positions).to(dtype)
        hidden = torch.randn(rows, length, spec.config.hidden_size, dtype=dtype, requires_grad=True)
        arguments = positions(module.kind, hidden, ids) if isinstance(module, Block) else {}
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors([arguments, *module.parameters()])}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, given: set[int] = given, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in given:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = module._run(hidden, ids, arguments)[0] if isinstance(module, Block) else module.norm(hidden)
        measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        assert output.requires_grad
        assert isinstance(module, (Block, Head))
        assert saved_by(spec, LayerCase(layer, rows, length, dtype)).inside == pytest.approx(measured, rel=0.01)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []


def test_experts_keep_what_the_tokens_sent_to_them_need(tmp_path: Path) -> None:
    fields = {**TINY, "model_type": "mixtral", "num_local_experts": 8}
    case = LayerCase(1, 1, 512, torch.float32)
    kept = {
        count: saved_by(spec_of(tmp_path, fields | {"num_experts_per_tok": count}), case).inside for count in (1, 2, 4)
    }
    assert kept[4] - kept[2] == pytest.approx(2 * (kept[2] - kept[1]), rel=0.01)
    assert kept[2] - kept[1] > 512 * 4 * (64 + 2 * 96 + 96)  # input, both products, what is multiplied


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_that_wait_are_those_of_a_real_pass(family: str, tmp_path: Path) -> None:
    """What a backward pass keeps whose gradients of weights come later."""
    spec, rows, length = spec_of(tmp_path, FAMILIES[family]), 2, 40
    positions = spec.positions()
    block = spec.build(1, positions)
    assert isinstance(block, Block)
    later = WeightGradients()
    later.defer(block)
    hidden = torch.randn(rows, length, spec.config.hidden_size, requires_grad=True)
    ids = torch.arange(length).repeat(rows, 1)
    output = block._run(hidden, ids, positions(block.kind, hidden, ids))[0]
    output.backward(torch.randn_like(output))
    later.close()
    (remembered,) = later._waiting
    inputs = {inputs.untyped_storage().data_ptr(): inputs.untyped_storage().nbytes() for _, inputs, _ in remembered}
    measured = sum(inputs.values()) + sum(gradient.nbytes for _, _, gradient in remembered)
    assert measured > 0
    assert saved_by(spec, LayerCase(1, rows, length, torch.float32)).waiting == measured
