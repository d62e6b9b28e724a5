"""Qwen3 (dense): the llama table with a norm on each head's queries and keys."""

from dataclasses import replace

from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from models.architectures import llama

FAMILY = replace(
    llama.FAMILY,
    name="qwen3",
    decoder_layer=Qwen3DecoderLayer,
    norm=lambda config: Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Qwen3RotaryEmbedding,
)
