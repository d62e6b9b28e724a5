"""Gemma 3, the text models: like Gemma 2 without caps, with norms on queries and keys.

Five of six blocks see a sliding window, and those have rotary angles of their own.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RMSNorm, Gemma3RotaryEmbedding

from models.architectures import gemma2
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


FAMILY = replace(
    gemma2.FAMILY,
    name="gemma3",
    decoder_layer=Gemma3DecoderLayer,
    norm=lambda config: Gemma3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Gemma3RotaryEmbedding,
    positions=Gemma3Positions,
    attention=ALL,
)
