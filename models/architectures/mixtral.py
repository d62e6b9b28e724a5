"""Mixtral: the llama table with a router and experts instead of one feed-forward network.

On disk each expert has three matrices of its own; in memory transformers holds all experts of a block in two tensors,
`gate_up_proj` [E, 2I, H] (w1 over w3) and `down_proj` [E, H, I] (w2).
"""

from models.architectures import llama
from models.architectures.family import Rule

MOE = "model.layers.{i}.block_sparse_moe."

FAMILY = llama.relative(
    "mixtral",
    "Mixtral",
    block=(
        Rule(
            (MOE + "experts.{e}.w1.weight", MOE + "experts.{e}.w3.weight"),
            "block.mlp.experts.gate_up_proj",
        ),
        Rule((MOE + "experts.{e}.w2.weight",), "block.mlp.experts.down_proj"),
        Rule(MOE + "gate.weight", "block.mlp.gate.weight"),
        *llama.FAMILY.block,
    ),
    router="mlp.gate",
)
