"""Gradients of weights that are computed later are torch's own, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from models.adapters import Lora, Trained
from models.api import read_spec
from models.block_options import PLAIN, BlockOptions
from models.causal_lm import CausalLM
from models.checkpoint.adapter import AdaptedStates
from models.checkpoint.source import open_source
from models.offload import Returns
from models.weight_gradients import WeightGradients, linear_layers
from tests.models.test_block_options import build

PASSES = 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8, bias=False))


def inputs() -> list[Tensor]:
    return [torch.randn(2, 5 + number, 16).requires_grad_() for number in range(PASSES)]


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def test_they_are_the_same_bits_and_come_in_order() -> None:
    usual, later = network(), WeightGradients()
    deferring = deepcopy(usual)
    later.defer(deferring)
    given = inputs()
    copies = [each.detach().clone().requires_grad_() for each in given]
    for each in given:
        usual(each).square().sum().backward()
    for each in copies:
        checkpoint(deferring, each, use_reentrant=False).square().sum().backward()
        later.close()
    for each, copy in zip(given, copies, strict=True):
        assert gradient(copy).equal(gradient(each))
    assert len(later) == PASSES
    assert [name for name, weight in deferring.named_parameters() if weight.grad is not None] == ["2.weight", "2.bias"]
    while len(later):
        later.compute()
    for (name, expected), found in zip(usual.named_parameters(), deferring.parameters(), strict=True):
        assert gradient(found).equal(gradient(expected)), name


@pytest.mark.parametrize("autocast", [False, True])
def test_hooks_see_each_gradient_once_and_under_autocast_nothing_is_left(autocast: bool) -> None:
    model, later = network(), WeightGradients()
    later.defer(model)
    seen: list[str] = []
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        model(inputs()[0]).float().sum().backward()
    later.close()
    if not autocast:
        later.compute()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())


def test_layers_with_adapters_leave_nothing(make_checkpoint: Callable[..., Path]) -> None:
    """Weights under adapters get no gradients, and those of the factors come at once."""
    folder = make_checkpoint("llama")
    spec = read_spec(folder).training(Trained(Lora(r=2, targets=("q_proj",))))
    states = AdaptedStates(open_source(folder, spec.base), spec, None)
    model, later = CausalLM(spec, states, torch.float32, torch.device("cpu")), WeightGradients()
    later.defer(model)
    model(torch.arange(12)[None]).square().sum().backward()
    assert later.collecting == []
    weights = dict(model.named_parameters())
    assert {name for name, each in weights.items() if each.grad is not None} == {
        name for name in weights if name.endswith(("lora_A", "lora_B"))
    }


@pytest.mark.longest
def test_compiled_layers_leave_them_too(make_checkpoint: Callable[..., Path]) -> None:
    """All of a block's are left for later, and are what a block gives that nobody compiles."""
    torch._dynamo.reset()
    models = [build(make_checkpoint("llama"), PLAIN) for _ in range(2)]
    later = WeightGradients()
    compiled, usual = (model.blocks[0] for model in models)
    later.defer(compiled)
    BlockOptions(compile=True).apply(1, compiled, Returns())
    torch.manual_seed(0)
    for length in (5, 9, 16, 23):
        hidden = torch.randn(1, length, models[0].spec.config.hidden_size)
        for block in (compiled, usual):
            block((hidden, torch.arange(length)[None]))[0].square().sum().backward()
        later.close()
    weights = [layer.weight for layer in linear_layers(compiled)]
    assert len(weights) == 7 and all(weight.grad is None for weight in weights)
    assert counters["stats"]["unique_graphs"]
    while len(later):
        later.compute()
    for (name, expected), found in zip(usual.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(gradient(found), gradient(expected), msg=name)
