"""OLMo 2: the llama table with norms behind attention and feed-forward instead of before them."""

from dataclasses import replace

from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RMSNorm, Olmo2RotaryEmbedding

from models.architectures import llama

FAMILY = replace(
    llama.FAMILY,
    name="olmo2",
    decoder_layer=Olmo2DecoderLayer,
    norm=lambda config: Olmo2RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Olmo2RotaryEmbedding,
)
