"""The three kinds of layer and what flows between them.

A micro-batch flows through every stage as the tuple `(hidden [B, S, H], position_ids [B, S] int64)`; the embedding
takes `(input_ids [B, S], position_ids)`. Position ids restart at 0 with each document of a packed row, and everything
that depends on who may see whom (causal masks, rotary angles) is derived from them on each stage, so that no S x S
mask ever crosses a stage boundary. The layers wrap transformers' modules and add nothing to their arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

if TYPE_CHECKING:
    from models.architectures import Family

Stream = tuple[Tensor, Tensor]

FULL, SLIDING = "full_attention", "sliding_attention"
_MASKS = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}


class Attention(NamedTuple):
    """What a block needs besides hidden states, for one micro-batch."""

    masks: dict[str, Any]  # by kind of attention; None where plain causal attention is enough
    rotary: tuple[Tensor, Tensor] | None  # cos and sin, each [B, S, head_dim]


class Positions:
    """Turns position ids into masks and rotary angles, once per micro-batch for all the blocks of a process.

    It remembers the last micro-batch only: the blocks of a stage run one after the other on the same position ids. It
    is no nn.Module on purpose: the rotary frequencies stay fp32 when the model is cast to bf16.
    """

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        self.config = config
        # On the CPU even where the caller builds on the meta device: the frequencies are computed, not loaded.
        with torch.device("cpu"):
            self.rotary = family.rotary(config=config) if family.rotary else None
        self.kinds = {attention_kind(config, index) for index in range(config.num_hidden_layers)}
        self._last: tuple[Tensor, tuple[Any, ...], Attention] | None = None

    def __call__(self, hidden: Tensor, position_ids: Tensor, cache: Cache | None = None) -> Attention:
        """Masks and angles for `hidden` [B, S, H] at `position_ids` [B, S]."""
        version = None if position_ids.is_inference() else position_ids._version
        state = (version, hidden.dtype, hidden.device, torch.is_inference_mode_enabled())
        if self._last is not None and self._last[0] is position_ids and self._last[1] == state:
            return self._last[2]
        rotary = None
        if self.rotary is not None:
            rotary = self.rotary.to(hidden.device)(hidden, position_ids=position_ids)
        masks = {
            kind: _MASKS[kind](
                config=self.config,
                inputs_embeds=hidden,
                attention_mask=None,
                past_key_values=cache,
                position_ids=position_ids,
            )
            for kind in self.kinds
        }
        attention = Attention(masks, rotary)
        self._last = (position_ids, state, attention)
        return attention


def attention_kind(config: PreTrainedConfig, index: int) -> str:
    """Whether block `index` (from 0) attends to everything before it or to a sliding window."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return str(layer_types[index])
    return SLIDING if getattr(config, "sliding_window", None) else FULL


class Embedding(nn.Module):
    """Layer 0: token ids [B, S] -> hidden states [B, S, H]."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)

    def forward(self, inputs: Stream) -> Stream:
        input_ids, position_ids = inputs
        return self.embed_tokens(input_ids), position_ids


class Block(nn.Module):
    """Layers 1..N: one decoder layer of transformers.

    With `recompute` set, the activations inside the block are dropped after the forward pass and computed again in the
    backward pass: memory for one hidden state a block instead of some thirty, for a third more arithmetic.
    """

    def __init__(self, family: Family, config: PreTrainedConfig, index: int, positions: Positions | None) -> None:
        super().__init__()
        self.block = family.decoder_layer(config, index)
        self.kind = attention_kind(config, index)
        self.recompute = False
        self._positions = positions

    def forward(self, stream: Stream, cache: Cache | None = None) -> Stream:
        hidden, position_ids = stream
        assert self._positions is not None, "a block built for its shapes cannot run"
        attention = self._positions(hidden, position_ids, cache)
        arguments = {
            "attention_mask": attention.masks[self.kind],
            "position_ids": position_ids,
            "position_embeddings": attention.rotary,
        }
        if cache is not None:
            arguments |= {"past_key_values": cache, "use_cache": True}
        if self.recompute and self.training:
            hidden = checkpoint(self.block, hidden, use_reentrant=False, **arguments)
        else:
            hidden = self.block(hidden, **arguments)
        return hidden, position_ids


class Head(nn.Module):
    """Layer N+1: the final norm and the projection to the vocabulary.

    Inside a pipeline (`project_in_loss`) it returns the normalised hidden states and leaves the projection to the loss,
    which needs it only for the supervised positions.
    """

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        super().__init__()
        self.norm = family.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.project_in_loss = False

    def forward(self, stream: Stream) -> Tensor:
        hidden: Tensor = self.norm(stream[0])
        return hidden if self.project_in_loss else self.project(hidden)

    def project(self, hidden: Tensor) -> Tensor:
        """Normalised hidden states [..., H] -> logits [..., V]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
