"""GLM-4-9B in transformers' layout (`-hf`): the llama table with interleaved rotary angles on half of each head and a
fused gate and up projection.
"""

from dataclasses import replace

from transformers.models.glm.modeling_glm import GlmDecoderLayer, GlmRMSNorm, GlmRotaryEmbedding

from models.architectures import llama

FAMILY = replace(
    llama.FAMILY,
    name="glm",
    decoder_layer=GlmDecoderLayer,
    norm=lambda config: GlmRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=GlmRotaryEmbedding,
)
