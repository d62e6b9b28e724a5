"""Architectures that no file declares, one of each kind of trait, and small checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.derived.derive import small_model
from models.derived.proof import roughen

ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What the config of a `model_type` has to say besides its defaults, which are no sound model of some.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0},
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0},
}
TRAITS = {
    "cohere2": "a scale on logits, one norm for attention and feed-forward, positions in some blocks only",
    "deepseek_v3": "latent attention, experts in groups, a bias of the router that is not trained",
    "gemma4_text": "scaled embeddings, a cap on logits, heads of two widths, angles by kind",
    "gpt_neox": "other names, feed-forward beside attention",
    "gpt_oss": "sinks, windows, experts with biases",
    "granite": "scales everywhere",
    "phi": "a bias of the head, angles for a part of each head",
    "qwen3_5_moe_text": "linear attention, experts, a shared expert",
    "smollm3": "tied, positions in some blocks only",
}


def config_of(model_type: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A config at the size that its models have, and its config.json."""
    config = CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {}) | changes)
    return config, {name: value for name, value in config.to_dict().items() if value is not None}


def write_small(folder: Path, model_type: str, **changes: Any) -> Any:
    """Write a small checkpoint as transformers does, with no two weights alike; gives the model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_model(*config_of(model_type, **changes))
        roughen(model)
    model.save_pretrained(folder)
    return model
