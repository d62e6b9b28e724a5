"""Shows when a stage's masks and angles are made anew, once a micro-batch, and that TF32 does not round them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.api import read_spec
from models.attention.positions import FULL
from tests.models.cases import CASES


def test_masks_are_made_once_a_micro_batch(make_checkpoint: Callable[..., Path]) -> None:
    positions = read_spec(make_checkpoint("llama")).positions()
    hidden = torch.zeros(2, 8, 32)
    position_ids = torch.arange(8).repeat(2, 1)
    made = positions(FULL, hidden, position_ids)
    assert positions(FULL, hidden, position_ids.view_as(position_ids)) is made  # as ZeRO's hooks hand it on
    equal = position_ids.clone()
    assert positions(FULL, hidden, equal) is not made
    made = positions(FULL, hidden, equal)
    equal[0, 4:] -= 4
    assert positions(FULL, hidden, equal) is not made
    made = positions(FULL, hidden, equal)
    assert positions(FULL, hidden.bfloat16(), equal) is not made
    with torch.inference_mode():  # of an evaluation, whose tensors no training may save
        made = positions(FULL, hidden, equal)
        assert positions(FULL, hidden, equal) is made
    assert positions(FULL, hidden, equal) is not made


class Tf32(TorchDispatchMode):
    """Rounds the factors of products as tensor cores do in TF32, where a process has allowed it."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        is_product = operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm)
        if is_product and torch.get_float32_matmul_precision() != "highest":
            arguments = [((factor.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32) for factor in arguments]
        return operator(*arguments, **(keywords or {}))


@pytest.fixture
def tf32() -> Any:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


class ByProduct(nn.Module):
    """Angles as transformers 5.17 computes them: a matrix product of frequencies and positions."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.frequencies = rotary.inv_freq

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (self.frequencies[None, :, None] @ position_ids[:, None].float()).transpose(1, 2)
        return angles.cos(), angles.sin()


@pytest.mark.parametrize("name", [*CASES, "by product"])
def test_no_product_of_positions_is_taken_in_tf32(name: str, make_case: Callable[..., Path], tf32: None) -> None:
    positions = read_spec(make_case(name if name in CASES else "llama-tied")).positions()
    if name == "by product":
        positions.rotary = ByProduct(positions.rotary)
    length = 2060  # from 2048 on, 10 bits and the leading one do not hold every number
    hidden, position_ids = torch.zeros(1, length, 32), torch.arange(length)[None]
    expected = positions.arguments(hidden, position_ids, None)
    with Tf32():
        found = positions.arguments(hidden, position_ids, None)
        probe = torch.tensor([[2049.0]]) @ torch.ones(1, 1)
    tensors = [[leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in (found, expected)]
    torch.testing.assert_close(*tensors, rtol=0, atol=0)
    assert probe.item() == 2050  # outside of it the mode does round
