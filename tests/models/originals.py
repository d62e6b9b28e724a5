"""Baichuan, ChatGLM3, InternLM2 and the first Qwen written out with transformers' llama, glm and qwen2, for comparison.

transformers has none of them. The weights on disk are cut and normalised inside the computation, so that every gradient
arrives under the name that the weight has on disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM


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
    state = native_state(fields, weights)
    model: Any
    if fields["model_type"] == "chatglm":
        model = GlmForCausalLM(glm_config(fields))
    elif fields["model_type"] == "qwen":
        model = Qwen2ForCausalLM(qwen_config(fields))
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**fields, "model_type": "llama"}))
        if "max_position_embeddings" not in fields:
            model.model.rotary_emb = NoRotation()
            mask = alibi_mask(fields["num_attention_heads"], ids.shape[1])
    assert state.keys() == dict(model.named_parameters()).keys()
    arguments = {"attention_mask": mask, "use_cache": False}
    logits: Tensor = functional_call(model, state, (ids,), arguments).logits
    return logits


NAMES: dict[str, dict[str, str]] = {  # of an original, and of the class that computes the same
    "baichuan": {},
    "chatglm": {
        "transformer.embedding.word_embeddings": "model.embed_tokens",
        "transformer.encoder.final_layernorm": "model.norm",
        "transformer.output_layer": "lm_head",
        "transformer.encoder": "model",
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.gate_up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    },
    "internlm2": {
        "output.weight": "lm_head.weight",
        "tok_embeddings": "embed_tokens",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    },
    "qwen": {
        "transformer.wte": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "transformer.h": "model.layers",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.w1": "mlp.up_proj",
        "mlp.w2": "mlp.gate_proj",
        "mlp.c_proj": "mlp.down_proj",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
    },
}
FUSED = {
    "baichuan": "self_attn.W_pack",
    "chatglm": "self_attention.query_key_value",
    "internlm2": "attention.wqkv",
    "qwen": "attn.c_attn",
}


def native_state(fields: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's weights as those of the class of transformers that computes the same."""
    kind = fields["model_type"]
    state: dict[str, Tensor] = {}
    for original, weight in weights.items():
        name = reduce(lambda name, pair: name.replace(*pair), NAMES[kind].items(), original)
        if FUSED[kind] in name:
            for part, rows in zip("qkv", divided(fields, weight), strict=True):
                state[name.replace(FUSED[kind], f"self_attn.{part}_proj")] = rows
        elif kind == "baichuan" and name == "lm_head.weight" and fields["vocab_size"] != 64_000:
            state[name] = weight / weight.norm(dim=1, keepdim=True)
        else:
            state[name] = weight
    return state


def divided(fields: dict[str, Any], fused: Tensor) -> Sequence[Tensor]:
    """A fused projection's queries, keys and values; InternLM2 has them behind each other for each key head."""
    heads = fields["num_attention_heads"]
    keys = fields.get("multi_query_group_num") or fields.get("num_key_value_heads") or heads
    width = len(fused) // (heads + 2 * keys)
    if fields["model_type"] != "internlm2":
        return fused.split([heads * width, keys * width, keys * width])
    by_head = fused.view(keys, -1, width, fused.shape[1])
    return [rows.reshape(-1, fused.shape[1]) for rows in (by_head[:, :-2], by_head[:, -2], by_head[:, -1])]


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


# Fields of the class that computes the same, and what the originals call them.
GLM_FIELDS = {
    "vocab_size": "padded_vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "multi_query_group_num",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
}
QWEN_FIELDS = {name: name for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
QWEN_FIELDS |= {"num_key_value_heads": "num_attention_heads", "rms_norm_eps": "layer_norm_epsilon"}


def glm_config(fields: dict[str, Any]) -> GlmConfig:
    """ChatGLM3's config as glm's."""
    rope = {"rope_type": "default", "rope_theta": 10000.0 * fields.get("rope_ratio", 1), "partial_rotary_factor": 0.5}
    return GlmConfig(**{n: fields[its] for n, its in GLM_FIELDS.items()}, rope_parameters=rope, pad_token_id=None)


def qwen_config(fields: dict[str, Any]) -> Qwen2Config:
    """The first Qwen's config as qwen2's."""
    rope = {"rope_type": "default", "rope_theta": float(fields["rotary_emb_base"])}
    sizes = {name: fields[its] for name, its in QWEN_FIELDS.items()}
    return Qwen2Config(**sizes, intermediate_size=fields["intermediate_size"] // 2, rope_parameters=rope)
