"""Chunks inside a turn: a layer gives what it gives for whole rows, and holds the activations of one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from models.attention import chunks
from models.attention.packed import Documents, unmarked
from models.causal_lm import CausalLM
from models.loading import SeededStates
from models.loss.interface import supervised_positions
from models.loss.micro_batch import micro_batch_loss
from options.weight_streaming import row_passes
from options.weight_streaming.row_passes import Batch, RowPasses, trained_in_chunks
from tests.models.attention.test_state_in_chunks import small
from tests.models.helpers import spec_of

LENGTH = 48
PACKED = torch.tensor([[*range(20), *range(28)], [*range(9), *range(39)]])
PADDED = torch.where(torch.arange(LENGTH) < 40, torch.arange(LENGTH), -1 - torch.arange(LENGTH)).repeat(2, 1)
WHOLE, CUTS = [LENGTH], [[24, 24], [20, 1, 15, 12], [1, 46, 1]]
SPECS: dict[str, Any] = {
    "llama": partial(spec_of, "llama"),
    "mixtral": partial(spec_of, "mixtral"),
    "mistral": partial(spec_of, "mistral", sliding_window=8),
    "gpt2": partial(spec_of, "gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    "bloom": partial(spec_of, "bloom"),
    "qwen3_5_text": partial(small, "qwen3_5_text"),  # linear attention in three of four blocks
}
Numbers = dict[str, Tensor]


class Weights:
    """Stand in for `LoadedLayers`: sum gradients, and note how often they came as a step's first."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self.layers, self.sums, self.firsts = layers, Numbers(), list[int]()

    def take_gradients(self, number: int, first: bool, scale: float) -> None:
        self.firsts += [number] * first
        for name, weight in self.layers[number].named_parameters():
            if weight.grad is not None:
                total = self.sums.get(f"{number}.{name}")
                self.sums[f"{number}.{name}"] = weight.grad if total is None else total + weight.grad
                weight.grad = None


class Micro(NamedTuple):
    """A micro-batch of two rows at a model's layers."""

    model: CausalLM
    position_ids: Tensor
    ids: Tensor
    labels: tuple[Tensor, ...]

    def passes(self, cuts: list[int], seed: tuple[int, ...] | None = (1, 2, 3)) -> RowPasses:
        layers = self.model.layers
        weight = 0.1 if self.model.spec.family.router else 0.0
        loss = partial(micro_batch_loss, z_loss_weight=0.01, router_loss_weight=weight)
        streamed: Any = SimpleNamespace(
            layer=layers.__getitem__,
            positions=[self.model.positions],
            loss=lambda activations, labels: loss(self.model.head, activations, labels),
        )
        documents = [Documents.of(unmarked(self.position_ids))]
        batch = Batch(iter(()), documents, [tuple(self.ids.shape)], [cuts], 0, seed)  # type: ignore[list-item]
        return RowPasses(streamed, batch, 0, self.position_ids)

    def labels_for(self, cuts: list[int]) -> tuple[Tensor, ...]:
        *labels, positions = self.labels
        return *labels, *trained_in_chunks(labels[0], cuts), positions

    def turn(self, cuts: list[int]) -> Numbers:
        """Pass all layers forward and back; return the loss, what layers hand on, and the gradients."""
        passes, weights, count = self.passes(cuts), Weights(list(self.model.layers)), len(self.model.layers)
        loaded: Any = weights
        given = [[self.ids]]
        for layer in range(count - 1):
            given.append(passes.forward(layer, given[-1]))
        found = {f"hidden.{layer}": each[0].clone() for layer, each in enumerate(given)}
        found["loss"], gradients = passes.loss(
            count - 1, [each.clone() for each in given[-1]], self.labels_for(cuts), loaded, True
        )
        for layer in reversed(range(count - 1)):
            gradients = passes.backward(layer, given[layer], [each.clone() for each in gradients], loaded, True)
            found |= {f"gradient.{layer}.{number}": each for number, each in enumerate(gradients)}
        assert sorted(weights.firsts) == list(range(count)), "the first gradients of a step overwrite its sums"
        return found | weights.sums


def micro_of(family: str, position_ids: Tensor = PACKED) -> Micro:
    spec = SPECS[family]()
    model = CausalLM(spec, SeededStates(spec, 0), torch.float32, torch.device("cpu")).train()
    model.head.project_in_loss = True
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, int(spec.config.vocab_size), position_ids.shape, generator=generator)
    targets = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -100, ids)
    scale, share = torch.tensor(0.02), torch.tensor(0.5)
    return Micro(model, position_ids, ids, (targets, scale, share, supervised_positions(targets, LENGTH)))


def assert_same(found: Numbers, expected: Numbers) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        # How fast states decay hardly changes the loss: of large terms with both signs, which round, little is left.
        close = 1e-4 if name.endswith(("A_log", "dt_bias", "in_proj_a.weight")) else 1e-6
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=close * float(each.abs().max()), msg=name)


@pytest.mark.parametrize(
    ("family", "rows"), [*((family, "packed") for family in SPECS), ("llama", "padded"), ("mixtral", "padded")]
)
def test_a_layer_gives_for_chunks_what_it_gives_for_whole_rows(family: str, rows: str) -> None:
    micro = micro_of(family, {"packed": PACKED, "padded": PADDED}[rows])
    expected = micro.turn(WHOLE)
    for cuts in CUTS:
        assert_same(micro.turn(cuts), expected)


def test_an_evaluation_has_the_loss_of_whole_rows() -> None:
    micro = micro_of("mixtral")
    micro.model.eval()
    losses = []
    for cuts in (WHOLE, *CUTS):
        passes, given, nothing = micro.passes(cuts, seed=None), [micro.ids], Weights([])
        with torch.no_grad():
            for layer in range(len(micro.model.layers) - 1):
                given = passes.forward(layer, given)
            loaded: Any = nothing
            losses.append(passes.loss(len(micro.model.layers) - 1, given, micro.labels_for(cuts), loaded, True)[0])
        assert not nothing.firsts
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(len(losses)))


class Held:
    """A tensor that autograd keeps, counted while it does."""

    now = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Held.now += tensor.nbytes
        Held.most = max(Held.most, Held.now)

    def __del__(self) -> None:
        Held.now -= self.tensor.nbytes


def test_a_turn_holds_the_activations_of_one_chunk() -> None:
    micro, most = micro_of("llama"), []
    for cuts in (WHOLE, [12] * 4):
        passes, loaded = micro.passes(cuts), Weights(list(micro.model.layers))
        given = passes.forward(0, [micro.ids])
        Held.now = Held.most = 0
        with saved_tensors_hooks(Held, lambda held: held.tensor):
            passes.backward(1, given, [torch.ones_like(given[0])], loaded, True)  # type: ignore[arg-type]
        assert Held.now == 0
        most.append(Held.most)
    # Keys and values of the row, and the fractions that are none of tokens: weights.
    weights = sum(weight.nbytes for weight in micro.model.layers[1].parameters())
    assert most[1] - weights < 0.5 * (most[0] - weights)


def test_passes_that_leave_keys_and_values_end_where_attention_begins() -> None:
    """The first chunk's passes a whole layer, as it shows which module is the last to attend."""
    micro, calls = micro_of("llama"), []
    mlp = micro.model.blocks[0].get_submodule("block.mlp")
    mlp.register_forward_hook(lambda *_: calls.append(1))
    loaded: Any = Weights(list(micro.model.layers))
    passes = micro.passes([12] * 4)
    given = passes.forward(0, [micro.ids])
    passes.backward(1, given, [torch.ones_like(given[0])], loaded, True)
    assert len(calls) == 4 + 1


def lost(kept: object, begin: int, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Take the gradients of a chunk's own keys and values from its own queries only."""
    return [each[:, :, begin:] for each in gradients]


def unfilled(extend: Callable[..., Any], memory: Any, module: Any, key: Tensor, value: Tensor, begin: int) -> Any:
    """Leave other keys than the row's."""
    return extend(memory, module, key + memory.filling, value, begin)


@pytest.mark.parametrize("fault", ["a lost gradient", "other keys", "the router loss of each chunk", "none"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    micro = micro_of("mixtral")
    expected = micro.turn(WHOLE)
    if fault == "a lost gradient":
        monkeypatch.setattr(chunks._Kept, "collect", lost)
    if fault == "other keys":
        memory = row_passes._LayerMemory
        extend = memory.extend
        monkeypatch.setattr(memory, "extend", lambda *arguments: unfilled(extend, *arguments))
    if fault == "the router loss of each chunk":
        monkeypatch.setattr(
            RowPasses,
            "_label_parts",
            lambda passes, labels: [
                (slice(end - 24, end), (labels[0][:, end - 24 : end + 1], *labels[1:3])) for end in accumulate([24, 24])
            ],
        )
    found = micro.turn([24, 24])
    with nullcontext() if fault == "none" else pytest.raises(AssertionError):
        assert_same(found, expected)
