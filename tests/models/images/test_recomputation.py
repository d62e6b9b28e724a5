"""Blocks of a tower that are computed again in the backward pass: the same bits, and each of them once more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from models.block_options import BlockOptions
from models.images import frozen
from models.images.embedding import SeeingEmbedding
from models.offload import Returns
from models.spec import ModelSpec
from tests.models.images.golden import Golden


def tower_of(golden: Golden, spec: ModelSpec, recompute: bool) -> SeeingEmbedding:
    tower = spec.build(0)
    assert isinstance(tower, SeeingEmbedding)
    tower.load_state_dict(golden.source.read_layer(0))
    BlockOptions(frozenset([0] if recompute else [])).apply(0, tower, Returns())
    return tower.train()


def passes(tower: SeeingEmbedding, images: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor | None], list[int]]:
    """Features, gradients, and how often each linear layer of a block was run."""
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        counts[name] = counts.get(name, 0) + 1

    for name, module in tower.eyes.named_modules():
        if isinstance(module, nn.Linear) and (".blocks." in name or ".layers." in name):
            module.register_forward_hook(lambda *_, name=name: count(name))
    features = tower.features(images)
    if features[0].requires_grad:
        torch.manual_seed(0)
        torch.autograd.backward(features, [torch.randn_like(each) for each in features])
    return features, {name: weight.grad for name, weight in tower.named_parameters()}, list(counts.values())


@pytest.mark.parametrize("as_a_whole", [False, True])
def test_no_bit_changes(as_a_whole: bool, golden: Golden) -> None:
    images = golden.images(0, 3)
    plain, again = (tower_of(golden, golden.spec, recompute) for recompute in (False, True))
    if as_a_whole:  # as a tower whose blocks transformers does not recompute
        again._blocks = []
    features, gradients, once = passes(plain, images)
    found, computed, twice = passes(again, images)
    torch.testing.assert_close(found, features, rtol=0, atol=0)
    torch.testing.assert_close(computed, gradients, rtol=0, atol=0)
    assert sum(each is not None for each in gradients.values()) > 10
    # Of a block whose result nobody needs there is no backward pass either.
    assert set(once) == {1} and 2 in twice and set(twice) <= {1, 2}


def test_a_tower_at_rest_is_never_computed_again(golden: Golden) -> None:
    spec = golden.spec.training(replace(golden.spec.trained, freeze=frozen(golden.spec, "nothing")))
    features, _, once = passes(tower_of(golden, spec, True), golden.images(0))
    assert not features[0].requires_grad and set(once) == {1}
