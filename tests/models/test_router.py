"""Shows that the router loss gathered along the layers is transformers' `aux_loss`, with and without padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from models import CausalLM, load_model
from models.router import RouterRecorder, router_loss
from tests.closeness import assert_near
from tests.models.cases import CASES
from tests.models.helpers import change_weights, oracle, random_ids

LENGTH = 24
PADDINGS = {"without padding": [0, 0, 0], "with padding": [0, 7, 23], "with a row of padding": [3, LENGTH, 0]}


@pytest.fixture(scope="module", params=[name for name, case in CASES.items() if "moe" in name or "mixtral" in name])
def folder(request: pytest.FixtureRequest, make_case: Callable[..., Path]) -> Path:
    """A checkpoint whose routers prefer some experts."""

    def widen(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".gate.weight"):
                tensor.mul_(8)

    folder = make_case(request.param)
    change_weights(folder, widen)
    return folder


def positions(padding: list[int]) -> Tensor:
    """Position ids of rows that end with so many tokens of padding."""
    ids = torch.arange(LENGTH).expand(len(padding), -1)
    real = ids < LENGTH - torch.tensor(padding)[:, None]
    return torch.where(real, ids, -1 - ids)


def loss_of(model: CausalLM, ids: Tensor, position_ids: Tensor) -> Tensor:
    sums = model.activations(ids, position_ids)[2]
    assert sums.dtype == torch.float32
    return router_loss(sums, model.spec.config.num_experts_per_tok)


def router_gradients(model: nn.Module) -> list[Tensor]:
    """In the order of the blocks."""
    named = model.named_parameters()
    return [p.grad for name, p in named if name.endswith("mlp.gate.weight") and p.grad is not None]


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
def test_loss_and_gradients_equal_transformers(folder: Path, padding: list[int]) -> None:
    ids, position_ids = random_ids(3, LENGTH), positions(padding)
    theirs = oracle(folder)
    mask = (position_ids >= 0).long() if any(padding) else None
    expected = theirs(ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    expected.backward()
    ours = load_model(folder)
    loss = loss_of(ours, ids, position_ids)
    loss.backward()

    top_k = ours.spec.config.num_experts_per_tok
    assert loss.item() > 1.02 * top_k, "the experts share the tokens too evenly to show anything"
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    assert len(router_gradients(ours)) == sum(hasattr(block.block.mlp, "gate") for block in ours.blocks)
    assert_near(router_gradients(ours), router_gradients(theirs))
    assert ours.embedding.embed_tokens.weight.grad is not None
    assert_near(ours.embedding.embed_tokens.weight.grad, theirs.get_input_embeddings().weight.grad)


def test_bf16_models_sum_in_fp32(folder: Path) -> None:
    model = load_model(folder, torch.bfloat16)
    counts, probabilities = model.activations(random_ids(3, LENGTH))[2].sum(dim=1).tolist()
    rows = 3 * LENGTH * sum(hasattr(block.block.mlp, "gate") for block in model.blocks)
    assert counts == model.spec.config.num_experts_per_tok * rows
    assert probabilities == pytest.approx(rows, rel=1e-5)


def test_micro_batch_without_tokens_has_a_loss_of_zero(folder: Path) -> None:
    model = load_model(folder)
    loss = loss_of(model, random_ids(1, LENGTH), positions([LENGTH]))
    loss.backward()
    assert loss.item() == 0.0
    assert all(gradient.isfinite().all() for gradient in router_gradients(model))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sums_and_loss_equal_transformers_for_any_shape(data: st.DataObject) -> None:
    experts, layers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    top_k = data.draw(st.integers(1, experts))
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    real = torch.rand(rows, length) < data.draw(st.sampled_from([0.2, 0.8, 1.1]))
    logits = tuple(torch.randn(rows * length, experts) * 3 for _ in range(layers))

    total = torch.zeros(2, experts)
    for layer in logits:
        router = nn.Identity()
        recorder = RouterRecorder(router, top_k)
        router((layer, None, None))
        total = total + recorder.statistics(real)
    tokens = float(real.sum()) * layers
    torch.testing.assert_close(total.sum(dim=1), torch.tensor([tokens * top_k, tokens]))
    expected = load_balancing_loss_func(logits, experts, top_k, real.long())
    if tokens:
        torch.testing.assert_close(router_loss(total, top_k), expected)
    else:
        assert float(router_loss(total, top_k)) == 0.0
