"""Rotary angles that depend on how long a text is: longrope (arXiv:2402.13753) and dynamic NTK scaling.

Both stretch the angles of texts beyond the length of pretraining. transformers decides by the largest position in a
micro-batch (and dynamic scaling remembers the one before), so a short document would be computed otherwise beside a
long one than alone, and its loss would depend on its neighbours. Here each document has the angles that transformers
gives it when it stands alone.

Cost: nothing for other kinds of rope; for these, one more set of angles for each length beyond pretraining's (longrope
has one for all of them) and a wait for the device, once per micro-batch and stage.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.position_ids import document_lengths

LONGROPE, DYNAMIC = "longrope", "dynamic"


class DocumentRotary(nn.Module):
    """transformers' rotary embedding, asked for one length of document at a time.

    Attributes:
        length: the length of pretraining, up to which the angles are the same.
        longest: beyond it they do not change any more; None where each length has its own.
    """

    def __init__(self, rotary: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__()
        self.rotary = rotary
        if config.rope_parameters["rope_type"] == LONGROPE:
            self.length = int(config.rope_parameters["original_max_position_embeddings"])
            self.longest: int | None = self.length + 1
        else:
            self.length = int(config.max_position_embeddings)
            self.longest = None

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Angles (cos, sin) [B, S, D] at `position_ids` [B, S], which restart with each document; padding, which is
        negative, has those of position 0.
        """
        lengths = document_lengths(position_ids).clamp(min=self.length, max=self.longest)
        first, *others = lengths.unique().tolist()
        cos, sin = self._of(lengths == first, hidden, position_ids)
        for length in others:
            chosen = lengths == length
            own_cos, own_sin = self._of(chosen, hidden, position_ids)
            cos = torch.where(chosen[..., None], own_cos, cos)
            sin = torch.where(chosen[..., None], own_sin, sin)
        return cos, sin

    def _of(self, chosen: Tensor, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The angles as transformers gives them to the chosen documents alone; all other tokens stand at 0."""
        self.rotary(hidden, torch.zeros_like(position_ids))  # dynamic scaling forgets the length before
        cos, sin = self.rotary(hidden, torch.where(chosen, position_ids, 0).clamp(min=0))
        return cos, sin


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether a document's angles depend on its length."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") in (LONGROPE, DYNAMIC)


def turning_length(config: PreTrainedConfig) -> int | None:
    """The length after which a growing text has other angles from its first token on, None where there is none.

    What a key-value cache holds is of no use then. (Dynamic scaling changes with every token; transformers lives with
    the old keys there, and so do we.)
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == LONGROPE else None
