"""What position ids say: they restart at 0 with each document of a packed row, and are -1 - p on padding."""

from __future__ import annotations

import torch
from torch import Tensor


def unmarked(position_ids: Tensor) -> Tensor:
    """Ordinary position ids on padding too."""
    return torch.where(position_ids < 0, -1 - position_ids, position_ids)


def document_lengths(position_ids: Tensor) -> Tensor:
    """For each token of `position_ids` [B, S] the length of its document, padding not counted."""
    documents = (position_ids == 0).cumsum(dim=1)
    last = torch.full((len(position_ids), position_ids.shape[1] + 1), -1, device=position_ids.device)
    last.scatter_reduce_(1, documents, position_ids, "amax")
    return last.gather(1, documents) + 1
