"""Weights rounded once for a turn give what weights rounded in every pass give, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic as cast

from models.block_options import to_fp8
from options.weight_streaming.eight_bits import EightBits
from tests.models.helpers import spec_of
from tests.options.weight_streaming.test_products import DOWN, block_of, results, results_with_kept

SPEC = spec_of("qwen2", num_hidden_layers=1)  # which has biases


KEPT = ["block.mlp.gate_proj", "block.self_attn.q_proj"]


def in_fp8(last: str | None, kept: Sequence[str] = ()) -> tuple[Any, Any, EightBits]:
    """A block in fp8 as a pipeline has it, and the same with copies."""
    plain = block_of(SPEC, torch.bfloat16)
    to_fp8(plain.block, emulate=True)
    copied, copies = copy.deepcopy(plain), EightBits()
    copies.add(1, copied, last, kept)
    copies.make([1])
    return plain, copied, copies


def test_results_are_those_of_a_pipeline() -> None:
    plain, copied, _ = in_fp8(None)
    torch.testing.assert_close(results(copied, SPEC), results(plain, SPEC), atol=0, rtol=0)


def test_without_the_last_product_gradients_are_the_same() -> None:
    plain, copied, _ = in_fp8(DOWN)
    (expected, *gradients), (found, *others) = results(plain, SPEC), results(copied, SPEC)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(others, gradients, atol=0, rtol=0)


def test_with_kept_products_gradients_are_the_same() -> None:
    """One has a bias."""
    plain, copied, _ = in_fp8(None, KEPT)
    torch.testing.assert_close(results_with_kept(copied, SPEC, KEPT), results(plain, SPEC), atol=0, rtol=0)
    for name in KEPT:
        linear = copied.get_submodule(name)
        linear.kept = torch.zeros_like(linear.kept)
        assert not torch.equal(results(copied, SPEC)[0], results(plain, SPEC)[0]), "it is not computed again"


def test_torch_multiplies_with_copies_as_a_gpu_does() -> None:
    """By the very calls that a GPU gets, which torch has for a CPU as well."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(96, 64, dtype=torch.bfloat16))
    to_fp8(plain)
    copied, copies = copy.deepcopy(plain), EightBits()
    copies.add(1, copied, None)
    copies.make([1])
    inputs, gradient = torch.randn(32, 96).bfloat16().requires_grad_(), torch.randn(32, 64).bfloat16()

    def outcome(module: nn.Module) -> list[Tensor]:
        output = module(inputs)
        return [output, *torch.autograd.grad(output, [inputs, *module.parameters()], gradient)]

    torch.testing.assert_close(outcome(copied), outcome(plain), atol=0, rtol=0)


def test_weights_are_rounded_once_a_turn_and_copies_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, copied, copies = in_fp8(DOWN)
    weights = {weight.untyped_storage()._cdata: weight.dim() for weight in copied.parameters()}
    rounded: list[int] = []

    def counted(tensor: Tensor, *arguments: Any, **keys: Any) -> Any:
        rounded.append(weights.get(tensor.untyped_storage()._cdata, 0))
        return cast(tensor, *arguments, **keys)

    for place in ("options.weight_streaming.eight_bits", "torchao.float8.float8_linear"):
        monkeypatch.setattr(f"{place}.hp_tensor_to_float8_dynamic", counted)
    copies.drop([1])
    with pytest.raises(AttributeError, match="copied"):
        results(copied, SPEC)
    copies.make([1])
    for _ in range(2):
        results(copied, SPEC)
    assert rounded.count(2) == list(weights.values()).count(2), "matrices once"
    assert rounded.count(0) > 2 * rounded.count(2), "inputs and gradients in each pass"


@pytest.mark.longest
def test_compiled_it_rounds_the_same_by_one_program_for_all_blocks() -> None:
    """Rounded at other places before, a number may fall on the other side of a step of fp8, of 6 % or of 12 %."""
    _, eager, _ = in_fp8(DOWN, KEPT)
    expected, programs = results_with_kept(eager, SPEC, KEPT), set[int]()
    for _ in range(2):
        _, compiled, copies = in_fp8(DOWN, KEPT)
        compiled.block.compile(dynamic=True)
        for _ in range(2):
            copies.make([1])
            for found, other in zip(results_with_kept(compiled, SPEC, KEPT), expected, strict=True):
                assert (found - other).norm() < 0.1 * other.norm()
            programs.add(counters["stats"]["unique_graphs"])
    assert len(programs) == 1, "else the ninth block would no longer be compiled"
