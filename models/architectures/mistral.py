"""Mistral: the llama table with sliding-window attention where config.json has a sliding_window."""

from dataclasses import replace

from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm, MistralRotaryEmbedding

from models.architectures import llama

FAMILY = replace(
    llama.FAMILY,
    name="mistral",
    decoder_layer=MistralDecoderLayer,
    norm=lambda config: MistralRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=MistralRotaryEmbedding,
)
