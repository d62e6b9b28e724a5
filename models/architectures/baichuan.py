"""Baichuan and Baichuan2: llama's block with a fused W_pack; 7B with rotary angles, 13B with ALiBi biases.

The original code never runs. Baichuan2's head divides each row of its weight by its length in every forward pass, so a
copy with normalised rows is a plain llama head; the first Baichuan's is one. All four share the `model_type`. Only the
7B's config.json limits the positions, as its rotary tables have to end somewhere, and the first generation has half as
many words as the second.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from models.architectures import llama
from models.architectures.bloom import alibi_slopes
from models.attention.cache import KeyValueCache
from models.attention.flex import FLEX
from models.attention.kernels import EAGER, TORCH
from models.attention.packed import Documents
from models.attention.positions import FULL, Angles, Arguments, Positions, Rotary
from models.family import Family, Native, Rule
from models.layers import Head

FIRST_VOCABULARY = range(64_000, 65_000)  # of the first generation, tokens that somebody added among them
FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class NormalisedHead(Head):
    """Project with the normalised rows of the weight."""

    def projection(self) -> Tensor:
        return F.normalize(super().projection())


class AlibiPositions(Positions):
    """Put ALiBi biases into the mask of a block that knows only rotary angles.

    Biases are slopes times distances, computed in fp32: rounded to bf16, near keys still differ from each other. The
    mask is [B, heads, S, S], one for all rows where no row is packed. Flex attention needs none.
    """

    def __init__(self, config: PreTrainedConfig, rotary: Rotary = None) -> None:
        super().__init__(config, rotary)
        self.slopes = alibi_slopes(config.num_attention_heads)
        if config._attn_implementation != FLEX:
            self.config = copy.copy(config)
            self.config._attn_implementation = EAGER  # a mask of numbers, also where nothing is packed

    def angles(self, hidden: Tensor, position_ids: Tensor, longest: int) -> dict[str, Angles]:
        one = torch.ones(1, 1, self.config.head_dim, dtype=hidden.dtype, device=hidden.device)
        return {FULL: (one, torch.zeros_like(one))}

    def scope(
        self, kind: str, hidden: Tensor, positions: Tensor, cache: KeyValueCache | None, documents: Documents | None
    ) -> Arguments:
        if self.config._attn_implementation == FLEX:
            return super().scope(kind, hidden, positions, cache, documents)
        if documents is not None and not documents.packed:  # the same in all rows
            hidden, positions = hidden[:1], positions[:1]
        mask = super().scope(kind, hidden, positions, cache, documents)["attention_mask"]
        keys, queries = positions, positions
        if cache is not None:
            keys = torch.arange(mask.shape[-1], device=hidden.device)[None]
        elif self.columns is not None:
            keys, queries = positions[:, : self.columns.stop], positions[:, self.columns]
        distances = keys[:, None, None, :] - queries[:, None, :, None]
        biases = self.slopes_on(hidden.device)[None, :, None, None] * distances
        return {"attention_mask": mask + biases.to(hidden.dtype)}


def translate(raw: dict[str, Any]) -> dict[str, Any]:
    """Translate Baichuan's config.json to the fields of LlamaConfig."""
    return {"model_type": "llama"} | {name: raw[name] for name in FIELDS if name in raw}


def _variant(raw: dict[str, Any]) -> Family:
    first, second = (FIRST_ROTARY, ROTARY) if "max_position_embeddings" in raw else (FIRST_ALIBI, ALIBI)
    return first if raw.get("vocab_size") in FIRST_VOCABULARY else second


ROTARY = replace(
    llama.FAMILY,
    name="baichuan2-7b",
    block=(
        Rule("model.layers.{i}.self_attn.W_pack.*", llama.QKV),
        *llama.FAMILY.block,
    ),
    projection=NormalisedHead,
    translate=translate,
    variant=_variant,
    native=Native(llama.FAMILY, "LlamaForCausalLM", {"lm_head.weight": F.normalize}),
)
ALIBI = replace(
    ROTARY,
    name="baichuan2-13b",
    rotary=None,
    positions=AlibiPositions,
    attention=(TORCH, EAGER, FLEX),
    native=None,
)
FIRST_ROTARY = replace(ROTARY, name="baichuan-7b", projection=None, native=Native(llama.FAMILY, "LlamaForCausalLM"))
FIRST_ALIBI = replace(ALIBI, name="baichuan-13b", projection=None)
FAMILY = ROTARY
