"""Who may see whom: what the blocks of a process need besides hidden states, derived from position ids.

Position ids restart at 0 with each document of a packed row. From them each stage makes, once per micro-batch, the
keyword arguments of its blocks: masks, rotary angles, ALiBi biases. A family names the class that does it. Padding
stands on the right, where no real token attends to it, and is treated like any token: its ids, -1 - p, become p for
masks and biases, so that a padded row still needs no mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from models.attention import FLASH, TORCH
from models.document_attention import Documents
from models.position_ids import unmarked
from models.rope import DocumentRotary, depends_on_length

if TYPE_CHECKING:
    from models.architectures import Family

FULL, SLIDING = "full_attention", "sliding_attention"
_MASKS = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}

Arguments = dict[str, Any]  # keyword arguments of a decoder layer
Angles = tuple[Tensor, Tensor]  # cos and sin


def attention_kind(config: PreTrainedConfig, index: int) -> str:
    """Whether block `index` (from 0) attends to everything before it or to a sliding window."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return str(layer_types[index])
    return SLIDING if getattr(config, "sliding_window", None) else FULL


def _same_memory(known: Tensor, other: Tensor) -> bool:
    """Whether two tensors that both exist are one; hooks of ZeRO hand on views."""
    return known.data_ptr() == other.data_ptr() != 0 and known.shape == other.shape


class Positions:
    """Causal masks and rotary angles, as llama and most families take them.

    It remembers the last micro-batch only: the blocks of a stage run one after the other on the same position ids. It
    is no nn.Module on purpose: the rotary frequencies stay fp32 when the model is cast to bf16.
    """

    cache_argument = "past_key_values"

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        self.config = config
        # On the CPU even where the caller builds on the meta device: the frequencies are computed, not loaded.
        with torch.device("cpu"):
            rotary = family.rotary(config=config) if family.rotary else None
        self.rotary = DocumentRotary(rotary, config) if rotary and depends_on_length(config) else rotary
        self.kinds = {attention_kind(config, index) for index in range(config.num_hidden_layers)}
        self._last: tuple[Tensor, tuple[Any, ...], dict[str, Arguments]] | None = None

    def __call__(self, kind: str, hidden: Tensor, position_ids: Tensor, cache: Cache | None = None) -> Arguments:
        """The arguments of a block of this kind of attention, for `hidden` [B, S, H] at `position_ids` [B, S]."""
        version = None if position_ids.is_inference() else position_ids._version
        state = (version, hidden.dtype, hidden.device, torch.is_inference_mode_enabled())
        if self._last is None or not _same_memory(self._last[0], position_ids) or self._last[1] != state:
            arguments = self.arguments(hidden, position_ids, cache)
            if cache is not None:
                for each in arguments.values():
                    each |= {self.cache_argument: cache, "use_cache": True}
            self._last = (position_ids, state, arguments)
        return self._last[2][kind]

    def arguments(self, hidden: Tensor, position_ids: Tensor, cache: Cache | None) -> dict[str, Arguments]:
        """The arguments for every kind of attention in the model; padding is still marked here."""
        angles = self.angles(hidden, position_ids)
        positions = unmarked(position_ids)
        separates = self.config._attn_implementation in (TORCH, FLASH) and cache is None
        documents = Documents.of(positions) if separates else None
        return {
            kind: {
                "position_ids": positions,
                "position_embeddings": angles[kind],
                **(
                    self.separated(kind, documents, hidden.device)
                    if documents
                    else {"attention_mask": self.mask(kind, hidden, positions, cache)}
                ),
            }
            for kind in self.kinds
        }

    def separated(self, kind: str, documents: Documents, device: torch.device) -> Arguments:
        """What keeps the documents of packed rows apart without a mask."""
        if self.config._attn_implementation == FLASH:
            return {"attention_mask": None, **documents.flash_arguments(device)}
        window = self.config.sliding_window if kind == SLIDING else None
        return {"attention_mask": None, "documents": documents, "document_window": window}

    def angles(self, hidden: Tensor, position_ids: Tensor) -> dict[str, Angles]:
        """The rotary angles (cos, sin) for every kind of attention, here the same for all."""
        assert self.rotary is not None
        positions = position_ids if isinstance(self.rotary, DocumentRotary) else unmarked(position_ids)
        return dict.fromkeys(self.kinds, self.rotary.to(hidden.device)(hidden, positions))

    def mask(self, kind: str, hidden: Tensor, position_ids: Tensor, cache: Cache | None) -> Any:
        """The mask in the form that the attention kernel takes; None where plain causal attention is enough."""
        return _MASKS[kind](
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=cache,
            position_ids=position_ids,
        )
