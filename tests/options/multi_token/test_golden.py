"""The formula of layers ahead, against losses, gradients and shares that transformers' and the authors' code give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from data.sample_set import InMemory
from models.ahead.model import looking_ahead, stored_ahead
from models.api import read_spec
from models.causal_lm import CausalLM
from models.checkpoint.source import open_source
from models.weight_map import reshape_rows
from options.multi_token.collation import AheadCollation
from options.multi_token.loss import AheadLoss

FOLDERS = ["glm4_moe-tiny", "deepseek_v3-tiny-2deep", "qwen3_5-text-tiny", "qwen3_next-tiny", "ernie4_5_moe-tiny"]
WEIGHT = 0.3


class Golden:
    """One of the folders, and the whole model with its layers ahead."""

    def __init__(self, folder: Path, detach: bool = True) -> None:
        self.found = json.loads((folder / "expected.json").read_text())
        self.tensors = load_file(folder / "expected.safetensors")
        spec = read_spec(folder)
        ahead = stored_ahead(folder, spec)
        assert ahead
        self.depth, self.spec = ahead.depth, looking_ahead(spec, ahead)
        source = open_source(folder, self.spec)
        self.model = CausalLM(self.spec, source, torch.float32, torch.device("cpu")).train()
        self.loss = AheadLoss(WEIGHT, detach, only=False)
        self.loss.expect(self.depth)
        self.loss.embed = self.model.embedding.embed_tokens
        self.model.head.project_in_loss = True

    def run(self, position_ids: Tensor | None = None, training: bool = True) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of the packed rows, and the measures."""
        given, trained = self.tensors, self.found["n_trained"]
        positions = given["position_ids"] if position_ids is None else position_ids
        self.model.train(training)
        activations = self.model.head(self.model.activations(given["input_ids"], positions))
        scales = torch.tensor([1 / count for count in trained["mtp"]])
        collation = AheadCollation(InMemory([]), self.depth)
        found = collation.to_last(given["input_ids"], positions, given["labels"])
        labels = given["labels"], torch.tensor(1 / trained["lm"]), torch.ones(()), *found
        loss = self.loss(self.model.head, activations, (*labels, scales))
        count, *sums = self.loss.take().tolist()
        assert count == 1
        return loss, self.loss.means(dict(zip(self.loss.measures, sums, strict=True)))

    def gradients(self, layer: int) -> dict[str, Tensor]:
        """Return the gradients of a layer under their names on disk."""
        module = self.model.layers[layer]
        state = {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad
            for name, weight in module.named_parameters()
        }
        found: dict[str, Tensor] = {}
        for binding in self.spec.weight_map.bindings(layer, state):
            shapes = binding.disk_shapes({name: gradient.shape for name, gradient in state.items()})
            pieces = reshape_rows([state[name] for name in binding.names], list(shapes.values()), binding.groups)
            found |= zip(shapes, pieces, strict=True)
        return found

    @property
    def head_layer(self) -> int:
        return self.spec.n_layers - 1

    @property
    def layers(self) -> list[Any]:
        return list(self.model.head.ahead or ())


def assert_gradient(found: Tensor, expected: Tensor, name: str) -> None:
    off = float((found - expected).norm())
    assert off <= max(1e-5, 1e-4 * float(expected.norm())), (name, off)


@pytest.mark.parametrize("name", FOLDERS)
def test_losses_gradients_and_shares_are_the_known_ones(name: str, shared: Path) -> None:
    golden = Golden(shared / "golden" / "mtp" / name)
    loss, measures = golden.run()
    assert float(loss.detach()) == pytest.approx(golden.found["lm_loss"], abs=1e-5)
    assert measures["mtp_loss"] == pytest.approx(golden.found["mtp_loss_mean"], abs=1e-5)

    loss.backward()
    found = golden.gradients(golden.head_layer)
    expected = {
        key.removeprefix("grad_mtp_detached."): each for key, each in golden.tensors.items() if "detached" in key
    }
    assert len(expected) > 10
    for key, gradient in expected.items():
        assert_gradient(found[key], WEIGHT * gradient, key)

    _, measures = golden.run(training=False)
    for depth, share in enumerate(golden.found["share_right_per_depth"], start=1):
        assert measures[f"draft_{depth}_right"] == pytest.approx(share)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_whole_model_learns_where_it_is_not_left_alone(name: str, shared: Path) -> None:
    golden = Golden(shared / "golden" / "mtp" / name, detach=False)
    golden.run()[0].backward()
    last_block = golden.head_layer - 1
    found = {key: each for layer in (0, last_block, golden.head_layer) for key, each in golden.gradients(layer).items()}
    if golden.spec.tied:
        found[golden.spec.weight_map.tied_embedding] = golden.gradients(0)[golden.spec.weight_map.tied_embedding]
    expected = {key.removeprefix("grad_joint."): each for key, each in golden.tensors.items() if "grad_joint" in key}
    assert len(expected) >= 4
    for key, gradient in expected.items():
        assert_gradient(found[key], gradient, key)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_models_own_gradients_are_those_without_to_the_bit(name: str, shared: Path) -> None:
    golden, found = Golden(shared / "golden" / "mtp" / name), list[dict[str, Tensor | None]]()
    for weight in (WEIGHT, 1e6):
        golden.loss._weight = weight
        golden.model.zero_grad()
        golden.run()[0].backward()
        found.append({key: own.grad for key, own in golden.model.named_parameters() if "ahead" not in key})
    torch.testing.assert_close(*found, rtol=0, atol=0)


def exchange_halves(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in golden.layers:
        halves = layer.joined.weight.data.chunk(2, dim=1)
        layer.joined.weight.data = torch.cat(halves[::-1], dim=1)


def leave_out_a_norm(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in golden.layers:
        monkeypatch.setattr(layer.norm, "forward", lambda hidden: hidden)


def take_the_token_itself(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    embed, ids = golden.loss.embed, golden.tensors["input_ids"]
    golden.loss.embed = lambda _: embed(ids)


def begin_before_the_norm(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = golden.model.head.forward

    def with_both_alike(activations: Any) -> Any:
        normalised, *rest, before = forward(activations)
        return before, *rest, normalised

    monkeypatch.setattr(golden.model.head, "forward", with_both_alike)


WRONG = {
    "swap": exchange_halves,
    "no_post": leave_out_a_norm,
    "same_token": take_the_token_itself,
    "prenorm_trunk": begin_before_the_norm,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", FOLDERS[:3])
def test_a_planted_fault_has_the_loss_of_that_wrong_way(
    wrong: str, name: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = Golden(shared / "golden" / "mtp" / name)
    WRONG[wrong](golden, monkeypatch)
    measures = golden.run()[1]
    first = measures.get("mtp_loss_1", measures["mtp_loss"])
    assert first == pytest.approx(golden.found["wrong_ways_loss_per_depth"][wrong][0], abs=1e-4)
    assert abs(first - golden.found["mtp_loss_per_depth"][0]) > 1e-3
