"""Gemma 2: scaled embeddings, norms around attention and feed-forward, every other block with a sliding window.

Attention scores and logits are soft-capped by a tanh. torch's attention kernel knows no cap on scores: transformers'
plain one, flash-attn or flex attention computes them.
"""

from dataclasses import replace

from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RMSNorm, Gemma2RotaryEmbedding

from models.architectures import llama
from models.attention import EAGER, FLASH
from models.flex_attention import FLEX
from models.layers import SoftCappedHead

FAMILY = replace(
    llama.FAMILY,
    name="gemma2",
    decoder_layer=Gemma2DecoderLayer,
    norm=lambda config: Gemma2RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Gemma2RotaryEmbedding,
    embedding_scale=lambda config: float(config.hidden_size**0.5),
    projection=SoftCappedHead,
    attention=(EAGER, FLASH, FLEX),
)
