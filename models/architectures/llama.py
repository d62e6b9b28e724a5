"""Llama, and what its relatives share with it: the naming table, and how transformers names their classes.

Grouped-query attention, tied or untied heads and the rope scaling of Llama 3 are all transformers' own: they follow
from config.json. Checkpoints of 2023 also store `rotary_emb.inv_freq` in every block, which is computed, not learned.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from models.family import Family, Rule, Tie

QKV = tuple(f"block.self_attn.{part}_proj.*" for part in "qkv")  # what other layouts fuse
FAMILY = Family(
    name="llama",
    decoder_layer=LlamaDecoderLayer,
    norm=lambda config: LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    rotary=LlamaRotaryEmbedding,
    embedding=(Rule("model.embed_tokens.weight", "embed_tokens.weight"),),
    block=(Rule("model.layers.{i}.*", "block.*"),),
    head=(Rule("model.norm.weight", "norm.weight"), Rule("lm_head.weight", "lm_head.weight")),
    tie=Tie(embedding="embed_tokens.weight", head="lm_head.weight"),
    carried=(r"\.rotary_emb\.inv_freq$",),
)


def relative(name: str, classes: str, like: Family = FAMILY, **others: Any) -> Family:
    """A family with the tables of another one, whose layers transformers has in `models.<name>`.

    Args:
        classes: how their names begin: of `...DecoderLayer`, `...RMSNorm` and `...RotaryEmbedding`.
        like: the other one.
        others: what else sets the family apart.
    """
    module: Any = import_module(f"transformers.models.{name}.modeling_{name}")
    norm = getattr(module, f"{classes}RMSNorm")
    return replace(
        like,
        name=name,
        decoder_layer=getattr(module, f"{classes}DecoderLayer"),
        norm=lambda config: norm(config.hidden_size, eps=config.rms_norm_eps),
        rotary=getattr(module, f"{classes}RotaryEmbedding"),
        **others,
    )
