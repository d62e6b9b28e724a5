"""Phi-3 and Phi-4 mini: the llama table with fused projections, which stay fused; long-context rope is transformers'
own.
"""

from dataclasses import replace

from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3RMSNorm, Phi3RotaryEmbedding

from models.architectures import llama

FAMILY = replace(
    llama.FAMILY,
    name="phi3",
    decoder_layer=Phi3DecoderLayer,
    norm=lambda config: Phi3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Phi3RotaryEmbedding,
)
