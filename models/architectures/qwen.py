"""The first Qwen: Qwen2's layers under other names, with queries, keys and values in one projection.

The original code never runs. Beyond `seq_length` it stretches angles and scores, in evaluation alone
(`use_dynamic_ntk`, `use_logn_attn`): what is trained is the plain arithmetic, which is what is computed here.
`intermediate_size` counts both halves of the feed-forward network; its `w2` is the gate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers.models.qwen2 import modeling_qwen2

from models.architectures import llama
from models.errors import CheckpointError
from models.family import Native, Rule, published

BLOCK = "transformer.h.{i}."
PUBLISHED = {"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True}
QWEN2 = llama.relative("qwen2", modeling_qwen2, "Qwen2")


def translate(raw: dict[str, Any]) -> dict[str, Any]:
    """Translate Qwen's config.json to the fields of Qwen2Config."""
    with published(raw, PUBLISHED, "Qwen"):
        heads, width = raw["num_attention_heads"], raw["hidden_size"]
        if raw.get("kv_channels", width // heads) * heads != width:
            raise CheckpointError(f"kv_channels is {raw['kv_channels']}; expected hidden_size / num_attention_heads")
        return {
            "model_type": "qwen2",
            "vocab_size": raw["vocab_size"],
            "hidden_size": width,
            "intermediate_size": raw["intermediate_size"] // 2,
            "num_hidden_layers": raw["num_hidden_layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "hidden_act": "silu",
            "max_position_embeddings": raw.get("seq_length", 8192),
            "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-6),
            "rope_theta": raw.get("rotary_emb_base", 10000),
            "initializer_range": raw.get("initializer_range", 0.02),
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            "attention_dropout": raw.get("attn_dropout_prob", 0.0),
        }


FAMILY = replace(
    QWEN2,
    name="qwen",
    prefix="transformer.",
    embedding=(Rule("transformer.wte.weight", "embed_tokens.weight"),),
    block=(
        Rule(BLOCK + "attn.c_attn.*", llama.QKV),
        Rule(BLOCK + "attn.c_proj.weight", "block.self_attn.o_proj.weight"),
        Rule(BLOCK + "mlp.w2.weight", "block.mlp.gate_proj.weight"),
        Rule(BLOCK + "mlp.w1.weight", "block.mlp.up_proj.weight"),
        Rule(BLOCK + "mlp.c_proj.weight", "block.mlp.down_proj.weight"),
        Rule(BLOCK + "ln_1.weight", "block.input_layernorm.weight"),
        Rule(BLOCK + "ln_2.weight", "block.post_attention_layernorm.weight"),
    ),
    head=(Rule("transformer.ln_f.weight", "norm.weight"), Rule("lm_head.weight", "lm_head.weight")),
    carried=(r"\.rotary_emb\.inv_freq$",),
    translate=translate,
    native=Native(QWEN2, "Qwen2ForCausalLM"),
)
