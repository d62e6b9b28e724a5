"""ChatGLM3-6B, also -base and -32k: transformers' Glm block under the names of the original code.

query_key_value is fused on disk and three projections in memory; dense_h_to_4h is the gate over the up projection in
both. The original code never runs. `-32k` differs by `rope_ratio`, which multiplies the base of the rotary angles; of
ChatGLM2, whose config.json differs by its name only, it divides positions, and is refused. The stored
`rotary_pos_emb.inv_freq` is computed, not learned, and carried along.
"""

from __future__ import annotations

from typing import Any

from transformers.models.glm.modeling_glm import GlmDecoderLayer, GlmRMSNorm, GlmRotaryEmbedding

from models.architectures import llama
from models.errors import CheckpointError
from models.family import Family, Native, Rule, published

BLOCK = "transformer.encoder.layers.{i}."
PUBLISHED = {
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "multi_query_attention": True,
    "post_layer_norm": True,
    "rmsnorm": True,
}


def translate(raw: dict[str, Any]) -> dict[str, Any]:
    """Translate ChatGLM's config.json to the fields of GlmConfig."""
    if "chatglm2" in str(raw.get("_name_or_path")).lower() and raw.get("rope_ratio", 1) != 1:
        reason = "by which ChatGLM2 (_name_or_path) divides positions; expected 1, or ChatGLM3"
        raise CheckpointError(f"rope_ratio is {raw['rope_ratio']}, {reason}")
    with published(raw, PUBLISHED, "ChatGLM3"):
        return {
            "model_type": "glm",
            "vocab_size": raw["padded_vocab_size"],
            "hidden_size": raw["hidden_size"],
            "intermediate_size": raw["ffn_hidden_size"],
            "num_hidden_layers": raw["num_layers"],
            "num_attention_heads": raw["num_attention_heads"],
            "num_key_value_heads": raw["multi_query_group_num"],
            "head_dim": raw["kv_channels"],
            "attention_bias": raw.get("add_qkv_bias", True),
            "attention_dropout": raw.get("attention_dropout", 0.0),
            "hidden_act": "silu",
            "max_position_embeddings": raw.get("seq_length", 8192),
            "rms_norm_eps": raw["layernorm_epsilon"],
            "rope_theta": 10000.0 * raw.get("rope_ratio", 1),
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            "pad_token_id": None,  # the original trains the row of its padding token like any other
            "bos_token_id": raw.get("bos_token_id"),
            "eos_token_id": raw.get("eos_token_id"),
        }


FAMILY = Family(
    name="chatglm3",
    decoder_layer=GlmDecoderLayer,
    norm=lambda config: GlmRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=GlmRotaryEmbedding,
    embedding=(Rule("transformer.embedding.word_embeddings.weight", "embed_tokens.weight"),),
    block=(
        Rule(BLOCK + "self_attention.query_key_value.*", llama.QKV),
        Rule(BLOCK + "self_attention.dense.weight", "block.self_attn.o_proj.weight"),
        Rule(BLOCK + "mlp.dense_h_to_4h.weight", "block.mlp.gate_up_proj.weight"),
        Rule(BLOCK + "mlp.dense_4h_to_h.weight", "block.mlp.down_proj.weight"),
        Rule(BLOCK + "input_layernorm.weight", "block.input_layernorm.weight"),
        Rule(BLOCK + "post_attention_layernorm.weight", "block.post_attention_layernorm.weight"),
    ),
    head=(
        Rule("transformer.encoder.final_layernorm.weight", "norm.weight"),
        Rule("transformer.output_layer.weight", "lm_head.weight"),
    ),
    prefix="transformer.",
    carried=(r"\.rotary_pos_emb\.inv_freq$",),
    tensor_plan=llama.GLM.tensor_plan,
    translate=translate,
    native=Native(llama.GLM, "GlmForCausalLM"),
)
