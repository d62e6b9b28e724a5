"""Gemma 3, the text models: like Gemma 2 without caps, with norms on queries and keys.

Five of six blocks see a sliding window, and those have rotary angles of their own.
"""

from __future__ import annotations

from torch import Tensor

from models.architectures import gemma2, llama
from models.attention import ALL
from models.position_ids import unmarked
from models.positions import Angles, Positions


class Gemma3Positions(Positions):
    """Rotary angles by kind of attention."""

    def angles(self, hidden: Tensor, position_ids: Tensor, longest: int) -> dict[str, Angles]:
        assert self.rotary is not None
        rotary = self.rotary.to(hidden.device)
        positions = unmarked(position_ids)
        return {kind: rotary(hidden, positions, kind) for kind in self.kinds}


FAMILY = llama.relative("gemma3", "Gemma3", gemma2.FAMILY, positions=Gemma3Positions, attention=ALL)
