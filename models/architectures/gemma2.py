"""Gemma 2: scaled embeddings, norms around attention and feed-forward, every other block with a sliding window.

Attention scores and logits are soft-capped by a tanh. torch's attention kernel knows no cap on scores: transformers'
plain one, flash-attn or flex attention computes them.
"""

from models.architectures.llama import relative
from models.attention.flex import FLEX
from models.attention.kernels import EAGER, FLASH
from models.layers import SoftCappedHead

FAMILY = relative(
    "gemma2",
    "Gemma2",
    embedding_scale=lambda config: float(config.hidden_size**0.5),
    projection=SoftCappedHead,
    attention=(EAGER, FLASH, FLEX),
)
