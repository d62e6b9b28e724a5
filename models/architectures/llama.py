"""Llama, and the families that differ from it by their classes in transformers alone: Gemma 2 and GLM-4.

Grouped-query attention, tied or untied heads and the rope scaling of Llama 3 are transformers' own: they follow from
config.json. Checkpoints of 2023 also store `rotary_emb.inv_freq` in every block, which is computed, not learned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers.models.gemma2 import modeling_gemma2
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

from models.attention.flex import FLEX
from models.attention.kernels import EAGER, FLASH
from models.family import Family, Rule
from models.layers import SoftCappedHead

QKV = tuple(f"block.self_attn.{part}_proj.*" for part in "qkv")  # what other layouts fuse
FAMILY = Family(
    name="llama",
    decoder_layer=modeling_llama.LlamaDecoderLayer,
    norm=lambda config: modeling_llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=modeling_llama.LlamaRotaryEmbedding,
    embedding=(Rule("model.embed_tokens.weight", "embed_tokens.weight"),),
    block=(Rule("model.layers.{i}.*", "block.*"),),
    head=(Rule("model.norm.weight", "norm.weight"), Rule("lm_head.weight", "lm_head.weight")),
    carried=(r"\.rotary_emb\.inv_freq$",),
)


def relative(name: str, modeling: Any, classes: str, **others: Any) -> Family:
    """Declare a family with llama's tables and layers of its own in transformers.

    Args:
        modeling: transformers' module with its classes.
        classes: how their names begin: of `...DecoderLayer`, `...RMSNorm` and `...RotaryEmbedding`.
        others: what else sets the family apart.
    """
    norm = getattr(modeling, f"{classes}RMSNorm")
    return replace(
        FAMILY,
        name=name,
        decoder_layer=getattr(modeling, f"{classes}DecoderLayer"),
        norm=lambda config: norm(config.hidden_size, eps=config.rms_norm_eps),
        rotary=getattr(modeling, f"{classes}RotaryEmbedding"),
        **others,
    )


# Scaled embeddings, norms around attention and feed-forward, every other block with a sliding window. Scores and logits
# are soft-capped by a tanh, of which torch's attention kernel knows nothing.
GEMMA2 = relative(
    "gemma2",
    modeling_gemma2,
    "Gemma2",
    embedding_scale=lambda config: float(config.hidden_size**0.5),
    projection=SoftCappedHead,
    attention=(EAGER, FLASH, FLEX),
)
# GLM-4-9B in transformers' layout (`-hf`): interleaved angles on half of each head, gate and up projection fused.
GLM = relative(
    "glm",
    modeling_glm,
    "Glm",
    tensor_plan={  # transformers gathers what gate and up projection give, as it would not shard them one by one
        **{f"self_attn.{part}_proj": "colwise" for part in "qkv"},
        "self_attn.o_proj": "rowwise",
        "mlp.gate_up_proj": "packed_colwise",
        "mlp.down_proj": "rowwise",
    },
)
