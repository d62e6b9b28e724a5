"""Rows in parts: what is exchanged, what a process keeps, and that tokens meet in attention only.

Gradients over real processes are in tests/training/engine/test_gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from models.attention.kernels import FLEX
from models.causal_lm import CausalLM
from models.layers import Block
from models.loading import SeededStates
from models.parallel.groups import RankGroup, RankGroups
from models.parallel.sequence import Exchanged, Folded, share_attention
from models.spec import ModelSpec
from tests.models.helpers import saved_tensors, spec_of

SPECS: dict[str, Callable[[], ModelSpec]] = {
    **{name: partial(spec_of, name) for name in ("llama", "bloom", "mixtral", "gemma2", "phi3", "chatglm")},
    "mistral": partial(spec_of, "mistral", sliding_window=8),
    "gpt_oss": partial(spec_of, "gpt_oss", num_local_experts=4, sliding_window=8),
    "baichuan2-7b": partial(spec_of, "baichuan", max_position_embeddings=256),
    "baichuan2-13b": partial(spec_of, "baichuan"),
    "dynamic": partial(spec_of, max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
}
LENGTH = 48
DOCUMENTS = torch.tensor([[*range(20), *range(28)], [*range(48)]])
PADDED = torch.where(torch.arange(LENGTH) < 40, torch.arange(LENGTH), -1 - torch.arange(LENGTH)).repeat(2, 1)


@pytest.mark.parametrize(
    "positions", [DOCUMENTS, PADDED, DOCUMENTS[1:].repeat(2, 1)], ids=["packed", "padded", "plain"]
)
@pytest.mark.parametrize("family", SPECS)
def test_rows_in_parts_give_what_whole_rows_give(family: str, positions: Tensor) -> None:
    spec = SPECS[family]()
    model = CausalLM(spec, SeededStates(spec, 0), torch.float32, torch.device("cpu"))
    ids = torch.randint(3, int(spec.config.vocab_size), (2, LENGTH))
    whole = model(ids, positions)
    names, weights = zip(*model.named_parameters(), strict=True)
    wanted = torch.autograd.grad(whole.square().mean(), weights, allow_unused=True)
    share_attention()
    model.positions.part = parts = Folded(4)
    found = model(parts.own(ids, -1), positions.clone()).view_as(whole)
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-5)
    gradients = torch.autograd.grad(found.square().mean(), weights, allow_unused=True)
    for name, gradient, expected in zip(names, gradients, wanted, strict=True):
        if expected is not None:
            assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name


class Alone:
    """In the place of other processes: what this one sends comes back, and is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Tensor] = []
        monkeypatch.setattr(torch.distributed, "all_to_all_single", self.exchange)

    def exchange(self, received: Tensor, sent: Tensor, group: None) -> None:
        self.sent.append(sent)
        received.copy_(sent)


def part_of(spec: ModelSpec, size: int) -> tuple[Block, Tensor, Tensor]:
    """A block whose process has a part of each row, its hidden states and the positions of whole rows."""
    positions = spec.positions(RankGroups(sequence=RankGroup(size, 0)) if size > 1 else RankGroups())
    block = spec.build(1, positions)
    assert isinstance(block, Block)
    hidden = torch.randn(2, LENGTH // size, spec.config.hidden_size, requires_grad=True)
    return block.train(), hidden, torch.arange(LENGTH).repeat(2, 1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_block_exchanges_four_times_each_way(size: int, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, others = spec_of(), Alone(monkeypatch)
    block, hidden, positions = part_of(spec, size)
    block.recompute = recompute
    output = block((hidden, positions))[0]
    keys = max(int(spec.config.num_key_value_heads), size)  # fewer are repeated
    heads = [int(spec.config.num_attention_heads), keys, keys, int(spec.config.num_attention_heads)]
    tokens = hidden.shape[0] * hidden.shape[1]
    assert [each.numel() for each in others.sent] == [tokens * each * spec.config.head_dim for each in heads]
    output.sum().backward()
    assert len(others.sent) == (12 if recompute else 8)


@pytest.mark.parametrize("family", ["llama", "mixtral", "phi3"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_process_keeps_its_part_of_the_activations(family: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a twentieth, in layers of the usual proportions: the result of attention is there twice."""
    usual = {"num_key_value_heads": 4, "intermediate_size": 224}
    spec, kept = spec_of(family, **usual), {}
    Alone(monkeypatch)
    for parts in (1, size):
        block, hidden, positions = part_of(spec, parts)
        with saved_tensors() as saved:
            output = block((hidden, positions))[0]
        storages = [each.untyped_storage() for each in saved if each.is_floating_point()]
        weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
        sizes = {each.data_ptr(): each.nbytes() for each in storages if each.data_ptr() not in weights}
        kept[parts] = sum(sizes.values())
        assert output.shape == hidden.shape
    assert 0.9 < kept[size] / (kept[1] / size) <= 1.05  # phi3's fused projection need not be kept, as its parts are


@pytest.mark.parametrize("rows", [1, 2])
def test_a_process_keeps_angles_of_its_own_tokens_only(rows: int) -> None:
    whole = torch.randn(rows, 8, 4)
    own = Exchanged(RankGroup(2, 1)).own(whole, -2)
    torch.testing.assert_close(own, whole[:, 4:])
    assert own.untyped_storage().nbytes() == own.nbytes


def test_each_process_has_the_slopes_of_its_heads() -> None:
    spec, cpu = spec_of("bloom"), torch.device("cpu")
    groups = [RankGroups(RankGroup(2, sequence), RankGroup(2, tensor)) for tensor in (0, 1) for sequence in (0, 1)]
    own = [spec.positions(each).slopes_on(cpu) for each in groups]
    torch.testing.assert_close(torch.cat(own), spec.positions().slopes_on(cpu), rtol=0, atol=0)
    spec.set_attention(FLEX)
    positions = spec.positions(RankGroups(RankGroup(2, 1)))
    hidden = torch.zeros(1, LENGTH // 2, spec.config.hidden_size)
    arguments = positions("full_attention", hidden, torch.arange(LENGTH)[None])
    assert isinstance(arguments["alibi"], Exchanged)
    assert len(arguments["attention_mask"].slopes) == 2
