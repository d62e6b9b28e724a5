"""Rotary angles that depend on how long a text is: longrope (arXiv:2402.13753) and dynamic NTK scaling.

Both stretch the angles of texts beyond the length of pretraining. transformers decides by the largest position in a
micro-batch (and dynamic scaling remembers the one before), so a document's loss would depend on its neighbours. Here
each has the angles that transformers gives it when it is alone: transformers computes the frequencies of each length
once, and a table on the device keeps them, so that the host need not know the lengths.

Cost: for longrope a table of two rows; for dynamic scaling a row for each length from pretraining's to the longest so
far: some 0.1 ms and half a head's fp32 numbers each. A micro-batch takes half a head's fp32 numbers for each token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.attention.packed import document_lengths

LONGROPE, DYNAMIC, YARN = "longrope", "dynamic", "yarn"


class DocumentRotary(nn.Module):
    """Rotary embedding with the frequencies of each document's own length."""

    def __init__(self, rotary: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__()
        self.rotary: Any = rotary
        turning = turning_length(config)
        # Up to the length of pretraining the angles are the same, and from `longest` on; None: each length has its own.
        self.length = int(config.max_position_embeddings) if turning is None else turning
        self.longest = None if turning is None else turning + 1
        self._table = torch.empty(0, device="cpu")

    def forward(self, hidden: Tensor, position_ids: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Angles (cos, sin) [B, S, D] at `position_ids` [B, S], which restart with each document; padding, which is
        negative, has those of position 0.

        Args:
            longest: no document has more tokens.
        """
        lengths = document_lengths(position_ids).clamp(min=self.length, max=self.longest)
        frequencies = self._frequencies(longest, hidden.device)[lengths - self.length]
        half = position_ids.clamp(min=0)[..., None] * frequencies
        angles = torch.cat((half, half), dim=-1)
        scale: float = self.rotary.attention_scaling
        return (angles.cos() * scale).to(hidden.dtype), (angles.sin() * scale).to(hidden.dtype)

    def _frequencies(self, longest: int, device: torch.device) -> Tensor:
        """Get those of lengths from `self.length` to at least `longest`, [lengths, D / 2] fp32."""
        last = max(self.length, min(longest, self.longest or longest))
        new = [self._of(length) for length in range(self.length + len(self._table), last + 1)]
        self._table = self._table.to(device)
        if new:
            self._table = torch.cat([self._table, torch.stack(new).to(device)])
        return self._table

    def _of(self, length: int) -> Tensor:
        """Get transformers' frequencies for a document of a given length."""
        numbers = torch.zeros(1)
        self.rotary(numbers, torch.tensor([[0]]))  # dynamic scaling forgets the length before
        self.rotary(numbers, torch.tensor([[length - 1]]))
        frequencies: Tensor = self.rotary.inv_freq.clone()
        return frequencies


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Return whether a document's angles depend on its length."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") in (LONGROPE, DYNAMIC)


def several_depend_on_length(config: PreTrainedConfig) -> bool:
    """Return whether they do so in several kinds of attention, which `DocumentRotary` cannot do."""
    kinds = (getattr(config, "rope_parameters", None) or {}).values()
    return any(isinstance(kind, dict) and kind.get("rope_type") in (LONGROPE, DYNAMIC) for kind in kinds)


def turning_length(config: PreTrainedConfig) -> int | None:
    """Get the length after which a growing text changes all its angles; None if never.

    What a key-value cache holds is of no use then. (Dynamic scaling changes with every token; transformers lives with
    the old keys there, and so do we.)
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == LONGROPE else None
