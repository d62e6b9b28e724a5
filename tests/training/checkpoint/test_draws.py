"""Random numbers of a run that goes on: those that come next, or others where the device is of another kind."""

from __future__ import annotations

import torch

from training.checkpoint.resume import draw_on

SEED = 7


def test_a_device_of_another_kind_begins_by_the_seed() -> None:
    states = {"cpu": torch.get_rng_state(), "device": torch.get_rng_state()}
    expected = torch.rand(3)
    torch.rand(5)
    assert draw_on(states, SEED)
    assert torch.equal(torch.rand(3), expected)
    assert not draw_on(states | {"device": torch.zeros(16, dtype=torch.uint8)}, SEED)  # as CUDA's are
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(SEED)))
