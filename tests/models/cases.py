"""The tiny models that the tests of the models wing go through: at least one of every family."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A `model_type` and what its config.json says besides the tests' sizes."""

    model_type: str
    changes: dict[str, Any]


PADDING = 7  # where a case has a padding token
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0],
    },
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {"num_key_value_heads": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "pad_token_id": PADDING}
OPT = {"num_key_value_heads": 4, "dropout": 0.0, "ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": PADDING}
CASES = {
    "bloom": Case("bloom", {"tie_word_embeddings": True}),
    "bloom-untied": Case("bloom", {"tie_word_embeddings": False}),
    "llama-tied": Case("llama", {"tie_word_embeddings": True}),
    "llama-untied": Case("llama", {"tie_word_embeddings": False}),
    "llama-dynamic": Case("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 32}),
    "llama-rope-scaling": Case("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral-window": Case("mistral", {"sliding_window": 16}),
    "mixtral": Case("mixtral", {"num_local_experts": 4}),
    "mixtral-window": Case("mixtral", {"num_local_experts": 3, "sliding_window": 16}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2-some-windows": Case("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": Case("qwen3", {"tie_word_embeddings": False}),
    "qwen3-tied": Case("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": Case("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe-some-dense": Case("qwen3_moe", EXPERTS | {"mlp_only_layers": [1], "num_experts_per_tok": 1}),
    "phi3": Case("phi3", {"sliding_window": 16}),
    "phi3-long": Case("phi3", LONG_ROPE | {"tie_word_embeddings": True}),
    "olmo2": Case("olmo2", {}),
    "glm": Case("glm", {"tie_word_embeddings": False}),
    "glm-tied": Case("glm", {"tie_word_embeddings": True, "attention_bias": False}),
    "glm4": Case("glm4", {}),
    "gemma2": Case("gemma2", CAPS | {"sliding_window": 16, "query_pre_attn_scalar": 8, "pad_token_id": PADDING}),
    "gemma3": Case(
        "gemma3_text",
        {
            "sliding_window": 16,
            "hidden_size": 80,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 8,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "baichuan2-7b": Case("baichuan", {"max_position_embeddings": 256, "pad_token_id": PADDING}),
    "baichuan2-13b": Case("baichuan", {"hidden_size": 80, "num_attention_heads": 5}),
    "baichuan-7b": Case("baichuan", {"vocab_size": 64_000, "max_position_embeddings": 256, "num_hidden_layers": 1}),
    "baichuan-13b": Case("baichuan", {"vocab_size": 64_000, "num_hidden_layers": 1}),
    "internlm2": Case("internlm2", {}),
    "internlm2-dynamic": Case("internlm2", {"max_position_embeddings": 32}),
    "qwen": Case("qwen", {}),
    "chatglm3": Case("chatglm", {"pad_token_id": PADDING}),
    "chatglm3-32k": Case("chatglm", {"rope_ratio": 50}),
    "gpt2": Case("gpt2", GPT2),
    "opt": Case("opt", OPT),
    "opt-projected": Case("opt", OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
}
