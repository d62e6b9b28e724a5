"""Baichuan2 and ChatGLM3 written out with transformers' llama and glm, for comparison.

transformers has neither. The weights on disk are cut and normalised inside the computation, so that every gradient
arrives under the name that the weight has on disk.
"""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM


def expected_of_original(folder: Path, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the gradient of every tensor of a checkpoint for the loss of predicting `ids`."""
    fields, tensors = read_original(folder)
    weights = {name: tensor.requires_grad_() for name, tensor in tensors.items() if not name.endswith("inv_freq")}
    logits = original_logits(fields, weights, ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    assert gradients.keys() == weights.keys()
    return logits.detach(), gradients


@torch.no_grad()
def answer_of_original(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The likeliest token after a prompt, `count` times, each from a whole pass."""
    fields, weights = read_original(folder)
    text = list(prompt)
    for _ in range(count):
        text.append(int(original_logits(fields, weights, torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def read_original(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the weights under their names on disk."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return json.loads((folder / "config.json").read_text()), tensors


def original_logits(fields: dict[str, Any], weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits of ordinary rows, from a config.json and weights under their names on disk."""
    mask = None
    if fields["model_type"] == "chatglm":
        model: Any = GlmForCausalLM(glm_config(fields))
        state = glm_state(fields, weights)
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**fields, "model_type": "llama"}))
        state = llama_state(weights)
        if "max_position_embeddings" not in fields:
            model.model.rotary_emb = NoRotation()
            mask = alibi_mask(fields["num_attention_heads"], ids.shape[1])
    assert state.keys() == dict(model.named_parameters()).keys()
    arguments = {"attention_mask": mask, "use_cache": False}
    logits: Tensor = functional_call(model, state, (ids,), arguments).logits
    return logits


class NoRotation(nn.Module):
    """Rotary angles of zero."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(1, 1, 1), torch.zeros(1, 1, 1)


def alibi_mask(heads: int, length: int) -> Tensor:
    """What each head adds to the score of a query (rows) and a key: [1, heads, length, length] (arXiv:2108.12409)."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
    keys = torch.arange(length)
    causal = torch.full((length, length), -torch.inf).triu(1)
    return (torch.tensor(slopes)[:, None, None] * keys + causal)[None]


def llama_state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Baichuan2's weights as llama's."""
    state: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if "W_pack" in name:
            for part, rows in zip("qkv", weight.chunk(3), strict=True):
                state[name.replace("W_pack", f"{part}_proj")] = rows
        elif name == "lm_head.weight":
            state[name] = weight / weight.norm(dim=1, keepdim=True)
        else:
            state[name] = weight
    return state


def glm_config(fields: dict[str, Any]) -> GlmConfig:
    """ChatGLM3's config as glm's."""
    return GlmConfig(
        vocab_size=fields["padded_vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["ffn_hidden_size"],
        num_hidden_layers=fields["num_layers"],
        num_attention_heads=fields["num_attention_heads"],
        num_key_value_heads=fields["multi_query_group_num"],
        head_dim=fields["kv_channels"],
        rms_norm_eps=fields["layernorm_epsilon"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0 * fields.get("rope_ratio", 1),
            "partial_rotary_factor": 0.5,
        },
        pad_token_id=None,
    )


GLM_NAMES = {
    "transformer.embedding.word_embeddings": "model.embed_tokens",
    "transformer.encoder.final_layernorm": "model.norm",
    "transformer.output_layer": "lm_head",
    "transformer.encoder": "model",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.gate_up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


def glm_state(fields: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """ChatGLM3's weights as glm's."""
    heads, groups = fields["num_attention_heads"], fields["multi_query_group_num"]
    rows = [count * fields["kv_channels"] for count in (heads, groups, groups)]
    state: dict[str, Tensor] = {}
    for original, weight in weights.items():
        name = reduce(lambda name, pair: name.replace(*pair), GLM_NAMES.items(), original)
        if "query_key_value" in name:
            for part, piece in zip("qkv", weight.split(rows), strict=True):
                state[name.replace("self_attention.query_key_value", f"self_attn.{part}_proj")] = piece
        else:
            state[name] = weight
    return state
