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
from tests.models.cases import CASES
from tests.models.helpers import LAYOUTS, assert_same_bits, gradients, in_layout, random_ids, shifted_loss

CPU = torch.device("cpu")
NAMES = ["llama-tied", "qwen2", "mixtral", "qwen3_moe-some-dense", "gemma2", "baichuan2-7b", "chatglm3"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Path:
    model_type, changes = CASES[request.param]
    return make_checkpoint(model_type, **changes)


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return read_spec(folder)


def read(states: SeededStates, order: list[int]) -> dict[str, Tensor]:
    read_once = {layer: states.read_layer(layer) for layer in order}
    return {f"{layer}.{name}": tensor for layer in sorted(read_once) for name, tensor in read_once[layer].items()}


def test_fresh_weights_do_not_depend_on_the_order_of_reading(spec: ModelSpec) -> None:
    forwards = read(SeededStates(spec, 7), list(range(spec.n_layers)))
    torch.manual_seed(123)
    assert_same_bits(read(SeededStates(spec, 7), list(reversed(range(spec.n_layers)))), forwards)
    assert {name: tensor.shape for name, tensor in forwards.items()} == {
        f"{layer}.{name}": shape for layer in range(spec.n_layers) for name, shape in spec.shapes(layer).items()
    }


def test_reading_fresh_weights_leaves_the_global_generator_alone(spec: ModelSpec) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    SeededStates(spec, 7).read_layer(1)
    assert torch.equal(torch.rand(3), expected)


def test_fresh_weights_differ_by_layer_and_seed(spec: ModelSpec) -> None:
    name = "block.self_attn.q_proj.weight"
    first, second = (SeededStates(spec, 7).read_layer(layer)[name] for layer in (1, 2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, SeededStates(spec, 8).read_layer(1)[name])


def test_fresh_weights_are_spread_as_transformers_spreads_them(spec: ModelSpec) -> None:
    for name, tensor in read(SeededStates(spec, 7), list(range(spec.n_layers))).items():
        if tensor.dim() > 1:
            std, count = spec.config.initializer_range, tensor.numel()
            assert float(tensor.std()) == pytest.approx(std, rel=4 / (2 * count) ** 0.5), name
            assert abs(float(tensor.mean())) < 4 * std / count**0.5, name
        else:
            from_zero = "bias" in name or "gemma" in spec.family.name  # whose norms add 1 to their weight
            assert torch.equal(tensor, torch.full_like(tensor, 0.0 if from_zero else 1.0)), name


def test_tied_head_starts_as_the_embedding_and_an_untied_one_does_not(spec: ModelSpec) -> None:
    states = SeededStates(spec, 7)
    embedding = states.read_layer(0)["embed_tokens.weight"]
    assert torch.equal(states.read_layer(spec.n_layers - 1)["lm_head.weight"], embedding) == spec.tied


@pytest.mark.parametrize("layout", [*LAYOUTS, "fresh"])
def test_tied_ends_are_one_parameter(folder: Path, spec: ModelSpec, layout: str, tmp_path: Path) -> None:
    if layout == "fresh":
        model = CausalLM(spec, SeededStates(spec, 7), torch.float32, CPU)
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
