"""GLM-4-9B in transformers' layout (`-hf`): the llama table with interleaved rotary angles on half of each head and a
fused gate and up projection.
"""

from models.architectures.llama import relative

FAMILY = relative(
    "glm",
    "Glm",
    tensor_plan={  # transformers gathers what gate and up projection give, as it would not cut them one by one
        **{f"self_attn.{part}_proj": "colwise" for part in "qkv"},
        "self_attn.o_proj": "rowwise",
        "mlp.gate_up_proj": "packed_colwise",
        "mlp.down_proj": "rowwise",
    },
)
