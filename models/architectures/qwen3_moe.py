"""Qwen3 with experts: the qwen3 table; blocks that `mlp_only_layers` names stay dense.

As in Mixtral, the experts lie one by one on disk and stacked in memory.
"""

from models.architectures import llama
from models.architectures.family import Rule

EXPERT = "model.layers.{i}.mlp.experts.{e}."

FAMILY = llama.relative(
    "qwen3_moe",
    "Qwen3Moe",
    block=(
        Rule((EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"), "block.mlp.experts.gate_up_proj"),
        Rule((EXPERT + "down_proj.weight",), "block.mlp.experts.down_proj"),
        *llama.FAMILY.block,
    ),
    router="mlp.gate",
)
