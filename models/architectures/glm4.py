"""GLM-4-0414: the glm table with two more norms in each block."""

from dataclasses import replace

from transformers.models.glm4.modeling_glm4 import Glm4DecoderLayer, Glm4RMSNorm, Glm4RotaryEmbedding

from models.architectures import llama

FAMILY = replace(
    llama.FAMILY,
    name="glm4",
    decoder_layer=Glm4DecoderLayer,
    norm=lambda config: Glm4RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Glm4RotaryEmbedding,
)
