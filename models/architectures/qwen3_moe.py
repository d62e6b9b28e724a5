"""Qwen3 with experts: the qwen3 table; blocks that `mlp_only_layers` names stay dense.

As in Mixtral, the experts lie one by one on disk and stacked in memory.
"""

from dataclasses import replace

from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
)

from models.architectures import llama
from models.architectures.family import Rule

EXPERT = "model.layers.{i}.mlp.experts.{e}."

FAMILY = replace(
    llama.FAMILY,
    name="qwen3_moe",
    decoder_layer=Qwen3MoeDecoderLayer,
    norm=lambda config: Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=Qwen3MoeRotaryEmbedding,
    block=(
        Rule((EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"), "block.mlp.experts.gate_up_proj"),
        Rule((EXPERT + "down_proj.weight",), "block.mlp.experts.down_proj"),
        *llama.FAMILY.block,
    ),
    router="mlp.gate",
)
