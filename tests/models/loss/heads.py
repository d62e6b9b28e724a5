"""Heads of models for tests of losses."""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers import Head


class Bare(Head):
    """A head that multiplies with a given matrix, [words, width]."""

    def __init__(self, weight: Tensor, cap: float | None = None) -> None:
        torch.nn.Module.__init__(self)
        self.lm_head = torch.nn.Linear(weight.shape[1], len(weight), bias=False)
        self.weight, self.cap = weight, cap

    def projection(self) -> Tensor:
        return self.weight
