"""A block computed again without its last product has the gradients of one that is computed whole, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from models.layers import Block
from models.loading import SeededStates, build_layer
from models.router import n_experts
from models.spec import ModelSpec
from options.weight_streaming.products import last_product, leave_out
from tests.models.attention.test_kernels import position_ids
from tests.models.cases import CASES
from tests.models.helpers import spec_of
from tests.options.weight_streaming.test_row_passes import CUTS, WHOLE, micro_of

LENGTH = 48
DOWN = "block.mlp.down_proj"
NAMES = {
    "llama-tied": DOWN,
    "qwen3": DOWN,
    "bloom": "block.mlp.dense_4h_to_h",
    "gpt2": None,  # its layers are not torch's linear ones
    "gemma2": None,  # it normalises what the MLP gives
    "mixtral": None,  # it ends in experts
}


def block_of(spec: ModelSpec, dtype: torch.dtype) -> Block:
    block = build_layer(spec, 1, SeededStates(spec, 0), spec.positions(), dtype, torch.device("cpu"))
    assert isinstance(block, Block)
    return block.train()


def results(block: Block, spec: ModelSpec) -> list[Tensor]:
    """The output, and the gradients of what a block was given and of its weights."""
    positions = position_ids([[5, 1, 22, 12], [24, 9, 3]], LENGTH)
    dtype, random = next(block.parameters()).dtype, torch.Generator().manual_seed(1)
    hidden = torch.randn(2, LENGTH, spec.config.hidden_size, generator=random).to(dtype).requires_grad_()
    sums = [torch.zeros(2, n_experts(spec.config))] if spec.family.router else []
    torch.manual_seed(0)
    output = block((hidden, positions, *sums))[0]
    weights = torch.randn(output.shape, generator=random).to(dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), [hidden, *block.parameters()])]


@pytest.mark.parametrize(("case", "name"), NAMES.items())
def test_the_last_product_is_the_one_that_nothing_depends_on(case: str, name: str | None) -> None:
    assert last_product(spec_of(CASES[case].model_type, **CASES[case].changes), 1) == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_no_gradient_changes_in_any_family(case: str, dtype: torch.dtype) -> None:
    spec = spec_of(CASES[case].model_type, **CASES[case].changes)
    if (name := last_product(spec, 1)) is None:
        return
    whole, shorter = block_of(spec, dtype), block_of(spec, dtype)
    leave_out(shorter.get_submodule(name))
    (expected, *gradients), (found, *others) = results(whole, spec), results(shorter, spec)
    assert not torch.equal(found, expected), "the product is there"
    torch.testing.assert_close(others, gradients, atol=0, rtol=0)


@pytest.mark.longest
def test_compiled_gradients_are_the_same_by_one_program_for_all_blocks() -> None:
    spec = spec_of("llama")
    eager, *compiled = (block_of(spec, torch.float32) for _ in range(3))
    leave_out(eager.get_submodule(DOWN))
    expected, programs = results(eager, spec), set[int]()
    for block in compiled:
        leave_out(block.get_submodule(DOWN))
        block.block.compile(dynamic=True)
        torch.testing.assert_close(results(block, spec), expected)
        programs.add(counters["stats"]["unique_graphs"])
    assert len(programs) == 1, "else the ninth block would no longer be compiled"


@pytest.mark.parametrize("cuts", [WHOLE, CUTS[0]], ids=["whole", "chunks"])
def test_forward_passes_are_whole(cuts: list[int]) -> None:
    """In turns what a layer hands on, the loss and the sums are those of whole passes."""
    plain, shorter = micro_of("llama"), micro_of("llama")
    for layer in shorter.model.layers[1:-1]:
        leave_out(layer.get_submodule(DOWN))
    torch.testing.assert_close(shorter.turn(cuts), plain.turn(cuts), atol=0, rtol=0)


def test_a_frozen_layer_and_one_with_a_bias_get_what_torch_gives() -> None:
    for bias, frozen in ((True, False), (False, True), (True, True)):
        torch.manual_seed(0)
        linear = nn.Linear(24, 16, bias=bias)
        linear.weight.requires_grad_(not frozen)
        inputs, gradient = torch.randn(2, 5, 24, requires_grad=True), torch.randn(2, 5, 16)
        asked = [inputs, *(weight for weight in linear.parameters() if weight.requires_grad)]
        expected = torch.autograd.grad(linear(inputs), asked, gradient)
        leave_out(linear)
        with torch.no_grad():
            assert linear(inputs).any()
        output = linear(inputs)
        assert not output.any() and output.untyped_storage().nbytes() == 4, "zeros take no memory"
        torch.testing.assert_close(torch.autograd.grad(output, asked, gradient), expected, atol=0, rtol=0)
