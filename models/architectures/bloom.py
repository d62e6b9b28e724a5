"""Bloom: ALiBi biases instead of rotary angles, a norm after the embedding, a tied head.

bigscience's own files leave the prefix `transformer.` out (`h.0...`), what transformers saves has it. The fused
query_key_value is interleaved by head and stays fused, as in transformers' block.

transformers' block computes its attention by itself, with all the scores in memory. Where a run takes flex attention,
or several processes share rows, the same weights are used with a kernel that knows of that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomBlock, build_alibi_tensor, dropout_add

from models.attention import flex
from models.attention.cache import KeyValueCache
from models.attention.flex import FLEX, Scope
from models.attention.kernels import EAGER
from models.attention.packed import Documents, unmarked
from models.attention.positions import FULL, Arguments, Positions, Rotary
from models.family import Family, Rule
from models.parallel.sequence import PartOfRows, over_parts


def alibi_slopes(n_heads: int) -> Tensor:
    """Compute the ALiBi slope of each head, [heads] fp32 (arXiv:2108.12409)."""
    with torch.device("cpu"):
        first_two_keys = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)
    return first_two_keys[:, 0, 1]


class BloomPositions(Positions):
    """Make causal masks and ALiBi biases in the form of Bloom's blocks.

    The bias of a key is its position times the head's slope. Softmax ignores what is added to a whole row, so positions
    may be counted from the beginning of each document.
    """

    cache_argument = "layer_past"

    def __init__(self, config: PreTrainedConfig, rotary: Rotary = None) -> None:
        super().__init__(config, rotary)
        self.slopes = alibi_slopes(config.n_head)

    def arguments(self, hidden: Tensor, position_ids: Tensor, cache: KeyValueCache | None) -> dict[str, Arguments]:
        documents = self.documents(position_ids) if cache is None else None
        position_ids = unmarked(position_ids)
        return {FULL: self.scope(FULL, hidden, position_ids, cache, documents)}

    def scope(
        self, kind: str, hidden: Tensor, positions: Tensor, cache: KeyValueCache | None, documents: Documents | None
    ) -> Arguments:
        scope = super().scope(kind, hidden, positions, cache, documents)
        if self.config._attn_implementation == FLEX:
            return scope | {"alibi": self.part}
        keys = positions if self.columns is None else positions[:, : self.columns.stop]
        if cache is not None:
            keys = torch.arange(cache.longest + hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)
        alibi = self.slopes_on(hidden.device)[None, :, None] * keys[:, None, :]
        alibi = alibi[:, :, None].to(hidden.dtype)
        if self.part is not None:
            return {"alibi": self.part, "attention_mask": scope["attention_mask"] + alibi}
        return scope | {"alibi": alibi.reshape(-1, 1, keys.shape[1])}


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float
) -> tuple[Tensor, None]:
    """Compute Bloom's attention as transformers calls it, biases in the mask."""
    scores = (query @ key.transpose(2, 3)) * scaling + attention_mask
    weights = module.attention_dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype))
    return (weights @ value).transpose(1, 2), None


class OpenBloomAttention(BloomAttention):
    """Run Bloom's attention by flex attention or over shared rows.

    `alibi` is the bias tensor, or else says whether rows are shared.
    """

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor | PartOfRows | None,
        attention_mask: Tensor | Scope | None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        if isinstance(alibi, Tensor):
            output: tuple[Tensor, Any] = super().forward(hidden_states, residual, alibi, attention_mask, **options)
            return output
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        kernel = over_parts(flex.attend if isinstance(attention_mask, Scope) else attend)
        extra = {"scaling": self.inv_norm_factor, "part_of_rows": alibi}
        attended, _ = kernel(self, query, key, value, attention_mask, **extra)
        attended = self.dense(attended.flatten(2))
        return dropout_add(attended, residual, self.hidden_dropout, self.training), None


def bloom_block(config: PreTrainedConfig, index: int) -> BloomBlock:
    block = BloomBlock(config, index)
    block.self_attention = OpenBloomAttention(config, index)
    return block


def layer_norm(config: PreTrainedConfig) -> nn.Module:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


FAMILY = Family(
    name="bloom",
    decoder_layer=bloom_block,
    norm=layer_norm,
    rotary=None,
    positions=BloomPositions,
    embedding_norm=layer_norm,
    attention=(EAGER, FLEX),
    tensor_plan={
        "self_attention.query_key_value": "colwise",
        "self_attention.dense": "rowwise",
        "mlp.dense_h_to_4h": "colwise",
        "mlp.dense_4h_to_h": "rowwise",
    },
    embedding=(
        Rule("transformer.word_embeddings.weight", "embed_tokens.weight"),
        Rule("transformer.word_embeddings_layernorm.*", "norm.*"),
    ),
    block=(Rule("transformer.h.{i}.*", "block.*"),),
    head=(Rule("transformer.ln_f.*", "norm.*"), Rule("lm_head.weight", "lm_head.weight")),
    prefix="transformer.",
)
