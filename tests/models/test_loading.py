"""Shows that fresh weights are a function of (seed, layer) alone, and that a tied model has one embedding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import CausalLM, load_model
from models.api import read_spec
from models.checkpoint.source import open_source
from models.loading import SeededStates, build_layer
from models.spec import ModelSpec
from tests.models.helpers import LAYOUTS, assert_same_bits, gradients, in_layout, random_ids, shifted_loss

CPU = torch.device("cpu")
NAMES = ["llama-tied", "qwen2", "mixtral", "qwen3_moe-some-dense", "gemma2", "baichuan2-7b", "chatglm3"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, make_case: Callable[..., Path]) -> Path:
    return make_case(request.param)


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return read_spec(folder)


def read(states: SeededStates, order: list[int]) -> dict[str, Tensor]:
    read_once = {layer: states.read_layer(layer) for layer in order}
    return {f"{layer}.{name}": tensor for layer in sorted(read_once) for name, tensor in read_once[layer].items()}


def test_fresh_weights_are_a_function_of_seed_and_layer_alone(spec: ModelSpec) -> None:
    """Neither the order of reading counts nor the global random numbers, which stay as they were."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    forwards = read(SeededStates(spec, 7), list(range(spec.n_layers)))
    assert torch.equal(torch.rand(3), expected)
    assert_same_bits(read(SeededStates(spec, 7), list(reversed(range(spec.n_layers)))), forwards)
    assert {name: tensor.shape for name, tensor in forwards.items()} == {
        f"{layer}.{name}": shape for layer in range(spec.n_layers) for name, shape in spec.shapes(layer).items()
    }
    name = "block.self_attn.q_proj.weight"
    assert not torch.equal(forwards[f"1.{name}"], forwards[f"2.{name}"])
    assert not torch.equal(forwards[f"1.{name}"], SeededStates(spec, 8).read_layer(1)[name])


def test_fresh_weights_are_spread_as_transformers_spreads_them(spec: ModelSpec) -> None:
    for name, tensor in read(SeededStates(spec, 7), list(range(spec.n_layers))).items():
        if tensor.dim() > 1:
            std, count = spec.config.initializer_range, tensor.numel()
            assert float(tensor.std()) == pytest.approx(std, rel=4 / (2 * count) ** 0.5), name
            assert abs(float(tensor.mean())) < 4 * std / count**0.5, name
        else:
            from_zero = "bias" in name or "gemma" in spec.family.name  # whose norms add 1 to their weight
            assert torch.equal(tensor, torch.full_like(tensor, 0.0 if from_zero else 1.0)), name


@pytest.mark.parametrize("layout", [*LAYOUTS, "fresh"])
def test_tied_ends_are_one_parameter(folder: Path, spec: ModelSpec, layout: str, tmp_path: Path) -> None:
    if layout == "fresh":
        states = SeededStates(spec, 7)
        model = CausalLM(spec, states, torch.float32, CPU)
        head, embedding = states.read_layer(spec.n_layers - 1)["lm_head.weight"], states.read_layer(0)
        assert torch.equal(head, embedding["embed_tokens.weight"]) == spec.tied  # also where two ranks hold them
    else:
        model = load_model(in_layout(folder, layout, tmp_path / "layers"))
    assert (model.head.lm_head.weight is model.embedding.embed_tokens.weight) == spec.tied
    ids = random_ids(1, 8)
    shifted_loss(model(ids), ids).backward()
    assert (spec.weight_map.tied_head in gradients(model)) == (not spec.tied)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_own_their_weights_in_the_dtype_asked_for(
    folder: Path, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loaded parameter must not be the file's memory: training would otherwise write into a mapped checkpoint."""
    folder = in_layout(folder, layout, tmp_path / "layers")
    spec = read_spec(folder)
    source = open_source(folder, spec)
    read = [source.read_layer(layer) for layer in range(spec.n_layers)]
    monkeypatch.setattr(source, "read_layer", read.__getitem__)
    positions = spec.positions()
    for layer in range(spec.n_layers):
        stored = {name: tensor.clone() for name, tensor in read[layer].items()}
        module = build_layer(spec, layer, source, positions, torch.float32, CPU)
        assert_same_bits({name: tensor.detach() for name, tensor in module.named_parameters()}, stored)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        assert_same_bits(read[layer], stored)
