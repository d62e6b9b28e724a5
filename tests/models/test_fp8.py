"""fp8 by torchao, emulated, compared with an emulation written out here; a block's weights stay what they are.

The emulation scales each tensor by its largest value, rounds it by torch's own 8-bit numbers and multiplies in fp32, as
a GPU does. bf16 alone is further from it than any tolerance here.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.api import read_spec
from models.block_options import FP8_MULTIPLE, FP8_PACKAGE, BlockOptions, fp8_obstacle, to_fp8
from models.checkpoint.source import open_source
from models.layers import Block
from models.loading import build_layer
from models.offload import Returns
from models.weight_gradients import linear_layers
from tests.conftest import ROOT
from tests.models.attention.test_kernels import position_ids
from tests.models.cases import CASES
from tests.models.helpers import saved_tensors, spec_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HIDDEN = 64  # of the tiny models
SAME = 2e-3  # relative: what a bf16 result's last digit explains


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers that 8 bits and one factor for the whole tensor give, in fp32."""
    factor = torch.finfo(dtype).max / tensor.abs().max().double()
    return (tensor.double() * factor).float().to(dtype).float() / factor.float()


class Emulated(torch.autograd.Function):
    """A product whose factors are rounded, forward and backward."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(inputs, weight)
        return (rounded(inputs, E4M3) @ rounded(weight, E4M3).t()).bfloat16()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = context.saved_tensors
        gradient = rounded(gradients[0], E5M2)
        to_weight = gradient.flatten(0, -2).t() @ rounded(inputs, E4M3).flatten(0, -2)
        return (gradient @ rounded(weight, E4M3)).bfloat16(), to_weight.bfloat16()


def emulated(linear: nn.Linear, inputs: Tensor) -> Tensor:
    product: Tensor = Emulated.apply(inputs, linear.weight)
    return product if linear.bias is None else product + linear.bias


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def results(module: Callable[[Tensor], Tensor], inputs: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The output and all gradients of a sum that weighs it at random."""
    inputs = inputs.detach().clone().requires_grad_()
    output = module(inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    gradients = torch.autograd.grad((output * weights).sum(), [inputs, *parameters.values()])
    return {"output": output.detach()} | dict(zip(["inputs", *parameters], gradients, strict=True))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, result in expected.items():
        assert distance(found[name], result) < SAME, name


@pytest.mark.parametrize("tokens", [16, 48])
def test_torch_multiplies_as_the_emulation_does(tokens: int) -> None:
    """By the very calls that a GPU gets, which torch has for a CPU as well."""
    torch.manual_seed(0)
    by_torch = nn.Sequential(nn.Linear(96, 64, dtype=torch.bfloat16))
    by_emulation = copy.deepcopy(by_torch)
    to_fp8(by_torch)
    to_fp8(by_emulation, emulate=True)
    inputs = torch.randn(1, tokens, 96).bfloat16()
    assert_same(*(results(each, inputs, dict(each.named_parameters())) for each in (by_torch, by_emulation)))


def build(folder: Path) -> Block:
    spec = read_spec(folder)
    source = open_source(folder, spec)
    block = build_layer(spec, 1, source, spec.positions(), torch.bfloat16, torch.device("cpu"))
    assert isinstance(block, Block)
    return block


def run(block: Block) -> dict[str, Tensor]:
    """The results for packed rows."""
    positions = position_ids([[5, 1, 22, 12], [24, 9, 3]], 48)
    hidden = torch.randn(2, 48, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    return results(lambda each: block((each, positions))[0], hidden, dict(block.named_parameters()))


def test_a_block_is_that_of_the_emulation(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("qwen2")  # which has biases
    exact, by_torchao, by_hand = build(folder), build(folder), build(folder)
    to_fp8(by_torchao.block, emulate=True)
    for linear in linear_layers(by_hand):
        vars(linear)["forward"] = MethodType(emulated, linear)
    found, expected, plain = (run(block) for block in (by_torchao, by_hand, exact))
    assert_same(found, expected)
    for name, result in expected.items():
        if name == "output" or name.endswith("proj.weight"):
            assert distance(plain[name], result) > SAME, name


@pytest.mark.parametrize("name", [name for name in CASES if not re.search("mix|moe|gpt2", name)])
def test_no_linear_layer_of_a_block_is_left_out_and_no_weight_is_another(
    name: str, make_case: Callable[..., Path]
) -> None:
    folder = make_case(name)
    assert fp8_obstacle(read_spec(folder)) is None
    block = build(folder)
    linear, before = len(linear_layers(block)), dict(block.named_parameters())
    to_fp8(block.block, emulate=True)
    assert linear and not linear_layers(block)
    assert sum(type(each).__name__ == "Float8Linear" for each in block.modules()) == linear
    after = dict(block.named_parameters())
    assert list(after) == list(before) and all(after[each] is before[each] for each in before)
    assert list(block.state_dict()) == list(build(folder).state_dict())


def test_recomputed_and_offloaded_it_rounds_the_same(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.block_options.to_fp8", partial(to_fp8, emulate=True))
    folder = make_checkpoint("llama")
    BlockOptions().apply(1, plain := build(folder), Returns())
    assert linear_layers(plain)
    found = []
    for recompute, offload in ((frozenset(), False), (frozenset(), True), (frozenset({1}), True)):
        options = BlockOptions(recompute, offload, fp8=True)
        options.apply(1, block := build(folder).train(), Returns())
        assert not linear_layers(block)
        found.append(run(block))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=0, rtol=0)


def test_the_backward_pass_keeps_the_bf16_inputs() -> None:
    """What the planner counts on: no more than without fp8."""
    layer = nn.Sequential(nn.Linear(32, 64, bias=False, dtype=torch.bfloat16))
    to_fp8(layer, emulate=True)
    with saved_tensors() as kept:
        layer(torch.randn(16, 32).bfloat16())
    sizes = {tensor.untyped_storage()._cdata: (tuple(tensor.shape), tensor.dtype) for tensor in kept}
    assert sorted(sizes.values()) == [((16, 32), torch.bfloat16), ((32, 64), torch.bfloat16)]
    assert layer.get_parameter("0.weight").untyped_storage()._cdata in sizes  # a view of the weight itself


def test_models_that_cannot_compute_in_fp8_are_refused() -> None:
    experts = spec_of("mixtral", num_local_experts=4)
    assert fp8_obstacle(experts) == "the experts of mixtral are no linear layers"
    odd = spec_of(intermediate_size=100)
    assert fp8_obstacle(spec_of("gpt2")) == "the weights of gpt2 are [in, out], and its layers not torch's linear ones"
    assert fp8_obstacle(odd) == f"a linear layer of the blocks has 100 features, no multiple of {FP8_MULTIPLE}"


def test_the_requirements_have_the_version_that_is_named() -> None:
    for name in ("requirements-dev.txt", "requirements-gpu.txt"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert [line.split()[0] for line in lines if line.startswith("torchao")] == [FP8_PACKAGE]


@pytest.mark.slow
def test_torchao_logs_nothing() -> None:
    """In a process of its own, as it is loaded here already; other logs pass."""
    words = "import logging; logging.basicConfig(); from torch import nn; from models.block_options import to_fp8; "
    words += "to_fp8(nn.Sequential(nn.Linear(16, 16)), True); logging.warning('mine')"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("", "WARNING:root:mine\n")


@pytest.mark.longest
def test_compiled_it_rounds_the_same(make_checkpoint: Callable[..., Path]) -> None:
    """Rounded at other places before, a number may fall on the other side of a step of fp8, of 6 % or of 12 %."""
    folder = make_checkpoint("llama")
    plain, eager, compiled = build(folder), build(folder), build(folder)
    for block in (eager, compiled):
        to_fp8(block.block, emulate=True)
    compiled.block.compile(dynamic=True)
    found, expected, exact = run(compiled), run(eager), run(plain)
    for name, result in expected.items():
        assert distance(found[name], result) < 0.7 * distance(exact[name], result), name
