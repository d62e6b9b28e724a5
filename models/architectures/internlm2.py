"""InternLM2 and 2.5: llama under other names, with the projections of queries, keys and values in one.

Its rows go by key heads: those of the queries that share a key, then the key's, then the value's, and so on. The
original code never runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.architectures import llama
from models.architectures.family import Native, Rule
from models.errors import CheckpointError

BLOCK = "model.layers.{i}."
RENAMED = {"bias": "attention_bias"}
ABOUT_CODE = ("auto_map", "architectures", "attn_implementation")


def translate(raw: dict[str, Any]) -> dict[str, Any]:
    """InternLM2's config.json in the fields of transformers' LlamaConfig.

    Raises:
        CheckpointError: it has biases, which no published checkpoint has.
    """
    if raw.get("bias"):
        raise CheckpointError("bias is true; Pipetune knows InternLM2's layers, where it is false")
    fields = {RENAMED.get(name, name): value for name, value in raw.items() if name not in ABOUT_CODE}
    return fields | {"model_type": "llama"}


FAMILY = replace(
    llama.FAMILY,
    name="internlm2",
    embedding=(Rule("model.tok_embeddings.weight", "embed_tokens.weight"),),
    block=(
        Rule(
            BLOCK + "attention.wqkv.weight",
            ("block.self_attn.q_proj.weight", "block.self_attn.k_proj.weight", "block.self_attn.v_proj.weight"),
            by_key_head=True,
        ),
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
