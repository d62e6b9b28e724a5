"""InternLM2 and 2.5: llama under other names, with the projections of queries, keys and values in one.

Its rows go by key heads: those of the queries that share a key, then the key's, then the value's, and so on. The
original code never runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.architectures import llama
from models.family import Native, Rule, published

BLOCK = "model.layers.{i}."
DROPPED = ("bias", "auto_map", "architectures", "attn_implementation")


def translate(raw: dict[str, Any]) -> dict[str, Any]:
    """Translate InternLM2's config.json to the fields of LlamaConfig."""
    with published(raw, {"bias": False}, "InternLM2"):
        return {name: value for name, value in raw.items() if name not in DROPPED} | {"model_type": "llama"}


FAMILY = replace(
    llama.FAMILY,
    name="internlm2",
    embedding=(Rule("model.tok_embeddings.weight", "embed_tokens.weight"),),
    block=(
        Rule(BLOCK + "attention.wqkv.*", llama.QKV, by_key_head=True),
        Rule(BLOCK + "attention.wo.weight", "block.self_attn.o_proj.weight"),
        Rule(BLOCK + "feed_forward.w1.weight", "block.mlp.gate_proj.weight"),
        Rule(BLOCK + "feed_forward.w3.weight", "block.mlp.up_proj.weight"),
        Rule(BLOCK + "feed_forward.w2.weight", "block.mlp.down_proj.weight"),
        Rule(BLOCK + "attention_norm.weight", "block.input_layernorm.weight"),
        Rule(BLOCK + "ffn_norm.weight", "block.post_attention_layernorm.weight"),
    ),
    head=(Rule("model.norm.weight", "norm.weight"), Rule("output.weight", "lm_head.weight")),
    translate=translate,
    native=Native(llama.FAMILY, "LlamaForCausalLM"),
)
