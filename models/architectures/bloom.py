"""Bloom: ALiBi biases instead of rotary angles, a norm after the embedding, a tied head.

bigscience's own files leave the prefix `transformer.` out (`h.0...`), what transformers saves has it. The fused
query_key_value is interleaved by head and stays fused, as in transformers' block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.models.bloom.modeling_bloom import BloomBlock, build_alibi_tensor

from models.architectures.family import Family, Rule, Tie
from models.attention import EAGER
from models.position_ids import unmarked
from models.positions import FULL, Arguments, Positions


def alibi_slopes(n_heads: int) -> Tensor:
    """The slope of each head's bias, [heads] fp32 (arXiv:2108.12409)."""
    with torch.device("cpu"):
        first_two_keys = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)
    return first_two_keys[:, 0, 1]


class BloomPositions(Positions):
    """Causal masks and ALiBi biases as Bloom's blocks take them.

    The bias of a key is its position times the head's slope. Softmax ignores what is added to a whole row, so positions
    may be counted from the beginning of each document.
    """

    cache_argument = "layer_past"

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        super().__init__(family, config)
        self.slopes = alibi_slopes(config.n_head)

    def arguments(self, hidden: Tensor, position_ids: Tensor, cache: Cache | None) -> dict[str, Arguments]:
        position_ids = unmarked(position_ids)
        seen = cache.get_seq_length() if cache is not None else 0
        keys = position_ids
        if seen:
            keys = torch.arange(seen + hidden.shape[1], device=hidden.device).expand(len(hidden), -1)
        alibi = self.slopes.to(hidden.device)[None, :, None] * keys[:, None, :]
        return {
            FULL: {
                "attention_mask": self.mask(FULL, hidden, position_ids, cache),
                "alibi": alibi.reshape(-1, 1, keys.shape[1]).to(hidden.dtype),
            }
        }


def layer_norm(config: PreTrainedConfig) -> nn.Module:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


FAMILY = Family(
    name="bloom",
    decoder_layer=BloomBlock,
    norm=layer_norm,
    rotary=None,
    positions=BloomPositions,
    embedding_norm=layer_norm,
    attention=(EAGER,),
    embedding=(
        Rule("transformer.word_embeddings.weight", "embed_tokens.weight"),
        Rule("transformer.word_embeddings_layernorm.*", "norm.*"),
    ),
    block=(Rule("transformer.h.{i}.*", "block.*"),),
    head=(Rule("transformer.ln_f.*", "norm.*"), Rule("lm_head.weight", "lm_head.weight")),
    tie=Tie(embedding="embed_tokens.weight", head="lm_head.weight"),
    optional_prefix="transformer.",
)
