"""A block computed again without some of its products has the gradients of one that is computed whole, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from models.layers import Block
from models.loading import SeededStates, build_layer
from models.router import n_experts
from models.spec import ModelSpec
from options.weight_streaming.products import keep, last_product, leave_out, worth_keeping
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


KEPT = {
    "llama-tied": ["block.mlp.gate_proj", "block.mlp.up_proj"],
    "bloom": ["block.mlp.dense_h_to_4h", "block.self_attention.query_key_value"],
    "gpt2": [],
    "gemma2": ["block.mlp.down_proj", "block.mlp.gate_proj"],  # the first for fewer numbers
    "mixtral": ["block.self_attn.q_proj", "block.self_attn.o_proj"],  # experts multiply the tokens that they get
}


def block_of(spec: ModelSpec, dtype: torch.dtype) -> Block:
    block = build_layer(spec, 1, SeededStates(spec, 0), spec.positions(), dtype, torch.device("cpu"))
    assert isinstance(block, Block)
    return block.train()


def given(block: Block, spec: ModelSpec) -> tuple[Tensor, ...]:
    positions = position_ids([[5, 1, 22, 12], [24, 9, 3]], LENGTH)
    dtype, random = next(block.parameters()).dtype, torch.Generator().manual_seed(1)
    hidden = torch.randn(2, LENGTH, spec.config.hidden_size, generator=random).to(dtype).requires_grad_()
    sums = [torch.zeros(2, n_experts(spec.config))] if spec.family.router else []
    torch.manual_seed(0)
    return hidden, positions, *sums


def results(block: Block, spec: ModelSpec) -> list[Tensor]:
    """The output, and the gradients of what a block was given and of its weights."""
    hidden, *others = given(block, spec)
    output = block((hidden, *others))[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), [hidden, *block.parameters()])]


def results_with_kept(block: Block, spec: ModelSpec, names: list[str]) -> list[Tensor]:
    """The same, once a forward turn has left products, which come back as rows of tokens."""
    with torch.no_grad():
        block(given(block, spec))
    for linear in map(block.get_submodule, names):
        assert isinstance(linear.kept, Tensor)
        linear.kept = linear.kept.flatten(0, -2).clone()
    return results(block, spec)


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


@pytest.mark.parametrize(("case", "names"), KEPT.items())
def test_the_products_worth_keeping_are_those_with_most_work(case: str, names: list[str]) -> None:
    found = worth_keeping(spec_of(CASES[case].model_type, **CASES[case].changes), 1)
    assert [each.name for each in found[:2]] == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_kept_products_change_no_gradient_in_any_family(case: str, dtype: torch.dtype) -> None:
    spec = spec_of(CASES[case].model_type, **CASES[case].changes)
    whole, keeping = block_of(spec, dtype), block_of(spec, dtype)
    names = [each.name for each in worth_keeping(spec, 1)[:2]]
    for name in names:
        keep(keeping.get_submodule(name))
    expected = results(whole, spec)
    torch.testing.assert_close(results_with_kept(keeping, spec, names), expected, atol=0, rtol=0)
    for linear in map(keeping.get_submodule, names):
        product = linear.kept
        linear.kept = torch.zeros_like(product)  # type: ignore[arg-type]
        assert not all(map(torch.equal, results(keeping, spec), expected)), "it is not computed again"
        linear.kept = product


@pytest.mark.longest
def test_compiled_gradients_are_the_same_by_one_program_for_all_blocks() -> None:
    spec = spec_of("llama")
    eager, *compiled = (block_of(spec, torch.float32) for _ in range(3))
    programs = set[int]()
    for block in (eager, *compiled):
        leave_out(block.get_submodule(DOWN))
        for name in KEPT["llama-tied"]:
            keep(block.get_submodule(name))
    expected = results_with_kept(eager, spec, KEPT["llama-tied"])
    for block in compiled:
        block.block.compile(dynamic=True)
        for _ in range(2):
            torch.testing.assert_close(results_with_kept(block, spec, KEPT["llama-tied"]), expected)
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
