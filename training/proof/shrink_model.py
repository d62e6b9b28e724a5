"""A small model with the traits of a large one: what a config.json says, with smaller numbers.

What decides which code runs stays: family, ties, biases, kinds of layers, experts a token, queries a key, how wide
heads are together beside the hidden states. Only sizes shrink. A size that config.json leaves out is written into it,
as the default is that of a large model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.layer_files import save_state_dict
from models.checkpoint.layout import layer_file
from models.spec import ModelSpec

HEAD, WINDOW, VOCABULARY = 16, 16, 512
HEADS, MANY_HEADS = 4, 16  # at least, where the model has so many; from when on they are narrower still
LEAST_EXPERTS = 4
MULTIPLE = 8  # of widths, as kernels like them
# What the families call the same size, the name that transformers itself takes first.
DEPTH = ("num_hidden_layers", "n_layer", "num_layers")
WIDTH = ("hidden_size", "n_embed")
INNER = ("intermediate_size", "ffn_hidden_size")
INNER_OF_EXPERTS = ("moe_intermediate_size",)
QUERIES = ("num_attention_heads", "n_head")
KEYS = ("num_key_value_heads", "multi_query_group_num")
HEAD_WIDTH = ("head_dim", "kv_channels")
EXPERTS = ("num_experts", "num_local_experts")
WORDS = ("vocab_size", "padded_vocab_size")
WITH_DROPOUT = ("dropout", "pdrop", "jitter")  # in the names of what draws random numbers


def shrunk_fields(spec: ModelSpec, n_blocks: int) -> dict[str, Any]:
    """The config.json of the same family with small layers, `n_blocks` of them at most."""
    config, raw = spec.config, dict(spec.raw)
    n_blocks = min(n_blocks, spec.n_blocks)
    queries, width = int(config.num_attention_heads), int(config.hidden_size)
    keys = int(getattr(config, "num_key_value_heads", None) or queries)
    head = int(getattr(config, "head_dim", None) or width // queries)
    ratio = queries // keys
    few_keys = min(keys, max(2, HEADS // ratio))
    few_queries = few_keys * ratio
    few_head = min(head, HEAD if few_queries <= MANY_HEADS else HEAD // 2)
    narrow = _multiple(few_queries * few_head * width / (queries * head))
    sizes: dict[tuple[str, ...], int] = {
        DEPTH: n_blocks,
        WIDTH: narrow,
        QUERIES: few_queries,
        KEYS: few_keys,
        HEAD_WIDTH: few_head,
        WORDS: min(int(config.vocab_size), VOCABULARY),
    }
    inner: tuple[tuple[str, ...], ...] = INNER, INNER_OF_EXPERTS
    sizes |= {names: _multiple(narrow * min(2, (getattr(config, names[0], None) or 0) / width)) for names in inner}
    if spec.family.router:
        sizes[EXPERTS] = min(int(config.num_experts), max(LEAST_EXPERTS, 2 * int(config.num_experts_per_tok)))
    for names, size in sizes.items():
        present = [name for name in names if name in raw] or [name for name in names[:1] if hasattr(config, name)]
        raw |= dict.fromkeys(present, size)
    if getattr(config, "query_pre_attn_scalar", None) == head:
        raw["query_pre_attn_scalar"] = few_head
    if raw.get("sliding_window"):
        raw["sliding_window"] = WINDOW
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or [])):
        raw["layer_types"] = [kinds[block % len(kinds)] for block in range(n_blocks)]
    if raw.get("mlp_only_layers"):
        raw["mlp_only_layers"] = [n_blocks - 1]
    return {name: _small_value(name, value, sizes[WORDS], few_head / head) for name, value in raw.items()}


def _small_value(name: str, value: Any, words: int, share: float) -> Any:
    """What depends on a size: ids of tokens below `words`, factors for a `share` of a head; and no dropout."""
    if is_dropout(name) and value:
        return 0.0
    if name.endswith("_token_id"):
        return [each % words for each in value] if isinstance(value, list) else value and value % words
    if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
        return {key: _thinned(entry, share) for key, entry in value.items()}
    return value


def is_dropout(name: str) -> bool:
    """Whether a field of a config.json says how much is dropped, by chance."""
    return any(word in name for word in WITH_DROPOUT)


def write_model(folder: Path, spec: ModelSpec, seed: int) -> None:
    """Write random weights in the pipeline layout, in fp32: no part is constant, so no gradient is zero or flat."""
    for layer in range(spec.n_layers):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + layer)
            state = {name: _random(tensor) for name, tensor in spec.build(layer).state_dict().items()}
        if spec.tied and layer == 0:
            embedding = state[spec.family.tie.embedding]
        if spec.tied and layer == spec.n_layers - 1:
            state[spec.family.tie.head] = embedding
        save_state_dict(state, folder / layer_file(layer))


def _random(tensor: Tensor) -> Tensor:
    """Matrices whose products keep their size, about; norms and biases around where they start."""
    if tensor.dim() > 1:
        return torch.randn_like(tensor) / tensor.shape[-1] ** 0.5
    return tensor + 0.1 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor


def _multiple(size: float) -> int:
    return max(1, round(size / MULTIPLE)) * MULTIPLE


def _thinned(entry: Any, share: float) -> Any:
    """A factor for each pair of a head's numbers, as longrope has, for a narrower head."""
    if not isinstance(entry, list):
        return entry
    count = max(1, round(len(entry) * share))
    return [entry[number * len(entry) // count] for number in range(count)]
