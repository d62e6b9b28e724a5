"""Qwen2 and Qwen2.5: the llama table with biases on the query, key and value projections."""

from dataclasses import replace

from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from models.architectures import llama

FAMILY = replace(
    llama.FAMILY,
    name="qwen2",
    decoder_layer=Qwen2DecoderLayer,
    norm=lambda config: Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Qwen2RotaryEmbedding,
)
