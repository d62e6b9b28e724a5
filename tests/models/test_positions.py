"""Shows when a stage's masks and angles are made anew: once a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from models.positions import FULL
from models.spec import ModelSpec


def test_masks_are_made_once_a_micro_batch(make_checkpoint: Callable[..., Path]) -> None:
    positions = ModelSpec.from_folder(make_checkpoint("llama")).positions()
    hidden = torch.zeros(2, 8, 32)
    position_ids = torch.arange(8).repeat(2, 1)
    made = positions(FULL, hidden, position_ids)
    assert positions(FULL, hidden, position_ids.view_as(position_ids)) is made  # as ZeRO's hooks hand it on
    equal = position_ids.clone()
    assert positions(FULL, hidden, equal) is not made
    made = positions(FULL, hidden, equal)
    equal[0, 4:] -= 4
    assert positions(FULL, hidden, equal) is not made
