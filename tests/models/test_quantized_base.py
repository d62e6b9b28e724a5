"""A base in 4 bits computes what transformers with bitsandbytes computes, one in fp8 what its folder stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from models.adapters import Lora, Trained
from models.api import read_spec
from models.causal_lm import CausalLM
from models.checkpoint.adapter import AdaptedStates, PeftFolder
from models.checkpoint.peft_names import peft_name, to_peft
from models.checkpoint.source import open_source
from models.quantized_base import BYTES
from tests.closeness import assert_near
from tests.models.adapters import RandomFactors, save_adapter
from tests.models.checkpoint.test_quantized import to_fp8
from tests.models.helpers import random_ids, shifted_loss

Make = Callable[..., Path]
NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)


def build(
    folder: Path, adapter: Path | None = None, base: str | None = "nf4", dtype: torch.dtype = torch.float32
) -> CausalLM:
    lora = Lora(r=2, alpha=6, base=base)
    spec = read_spec(folder).training(Trained(lora))
    factors = PeftFolder(adapter, spec) if adapter else RandomFactors(spec)
    states = AdaptedStates(open_source(folder, spec.base), spec, factors)
    return CausalLM(spec, states, dtype, torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama", "phi3", "bloom"])
def test_logits_and_gradients_are_those_of_transformers_and_bitsandbytes(family: str, make_checkpoint: Make) -> None:
    folder = make_checkpoint(family)
    adapter = save_adapter(read_spec(folder).training(Trained(Lora(r=2, alpha=6))), folder)
    model, ids = build(folder, adapter), random_ids(2, 20)
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=NF4, dtype=torch.float32, attn_implementation="eager"
    )
    base.train()  # or bitsandbytes packs the weights anew for a kernel of bf16
    theirs = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    found, expected = model(ids), theirs(input_ids=ids).logits
    assert_near(found, expected)
    shifted_loss(found, ids).backward()
    shifted_loss(expected, ids).backward()
    wanted = {name.replace(".default", ""): each.grad for name, each in theirs.named_parameters() if each.requires_grad}
    for layer, part in enumerate(model.layers):
        for name, weight in part.named_parameters():
            assert weight.requires_grad == name.endswith(("lora_A", "lora_B"))
            if weight.grad is not None:
                twin = wanted.pop(peft_name(model.spec, layer, name))
                assert twin is not None
                assert_near(to_peft(name, weight.grad), twin, name=name)
    assert not wanted


def test_packed_weights_are_those_of_bitsandbytes(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama")
    model = build(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4, dtype=torch.float32)
    for ours, theirs in zip(model.blocks, base.model.layers, strict=True):
        one: Any = ours.block.get_submodule("self_attn.q_proj")
        other = theirs.self_attn.q_proj
        assert torch.equal(one.weight, other.weight)
        wide = dequantize_4bit(one.weight, one.packed["weight"])
        assert torch.equal(wide, dequantize_4bit(other.weight, other.weight.quant_state))


def test_experts_are_packed_too(make_checkpoint: Make) -> None:
    """With the weights that 4 bits stand for, a model in 32 bits gives the same."""
    folder = make_checkpoint("mixtral", num_local_experts=4)
    model, ids = build(folder), random_ids(2, 20)
    spec = read_spec(folder).training(Trained(Lora(r=2, alpha=6)))
    states = AdaptedStates(open_source(folder, spec.base), spec, RandomFactors(spec))
    wide = CausalLM(spec, states, torch.float32, torch.device("cpu"))
    for packed, block in zip(model.blocks, wide.blocks, strict=True):
        modules = dict(block.named_modules())
        for path, module in packed.named_modules():
            for name, state in vars(module).get("packed", {}).items():
                weight = module._parameters[name]
                value = state(weight) if callable(state) else dequantize_4bit(weight, state)
                twin = modules[path]._parameters[name]
                assert twin is not None
                twin.data.copy_(value)
    found, expected = model(ids), wide(ids)
    assert_near(found, expected)
    for each in (found, expected):
        shifted_loss(each, ids).backward()
    for (name, weight), (_, twin) in zip(model.named_parameters(), wide.named_parameters(), strict=True):
        if twin.grad is not None:
            assert weight.grad is not None
            assert_near(weight.grad, twin.grad, name=name)


def test_a_block_takes_a_bit_more_than_half_a_byte_a_weight(make_checkpoint: Make) -> None:
    model = build(make_checkpoint("llama", hidden_size=256, intermediate_size=1024))
    for block in model.blocks:
        for module in block.modules():
            for name, state in vars(module).get("packed", {}).items():
                held = module.get_parameter(name).nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
                assert held / state.shape.numel() == pytest.approx(BYTES["nf4"], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_base_in_fp8_computes_with_what_its_folder_stands_for(
    family: str, dtype: torch.dtype, make_checkpoint: Make
) -> None:
    """To the bit, as a weight is widened to what the folder is read as without `base`; experts lie there one by one."""
    folder = make_checkpoint(family, hidden_size=40, intermediate_size=72)  # no multiples of a block
    to_fp8(folder)
    held, wide = build(folder, base="fp8", dtype=dtype), build(folder, base=None, dtype=dtype)
    packed = [name for name, weight in held.named_parameters() if weight.dtype == torch.uint8]
    assert packed == [name for name, weight in wide.named_parameters() if is_stored(name, weight)]
    ids = random_ids(2, 20)
    found, expected = held(ids), wide(ids)
    assert torch.equal(found, expected)
    for each in (found, expected):
        shifted_loss(each, ids).backward()
    gradients = {name: weight.grad for name, weight in held.named_parameters() if weight.grad is not None}
    assert any(gradient.any() for name, gradient in gradients.items() if name.endswith("lora_A"))
    for name, twin in wide.named_parameters():
        if twin.grad is not None:
            assert torch.equal(gradients.pop(name), twin.grad), name
    assert not gradients


def is_stored(name: str, weight: torch.Tensor) -> bool:
    """Return whether `to_fp8` stores a weight in 8 bits."""
    return "block" in name and weight.dim() > 1 and not name.endswith(("lora_A", "lora_B", "gate.weight"))
