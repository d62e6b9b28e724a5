"""A model as a function of tensors alone, which an exporter can trace: its key-value cache goes in and comes out.

The layers are those of `CausalLM`. What differs from its passes: keys and values are joined to the given ones instead
of being written into a buffer, attention is plain arithmetic under a mask, and padding is told by a mask from outside.
A token's position is its place in the row, padding counted: rotary angles and ALiBi biases know distances only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.attention import EAGER
from models.causal_lm import CausalLM
from models.generation.cache import KeyValueCache

Past = list[tuple[Tensor, Tensor]]  # for each block keys and values [B, heads, tokens, width]


class GivenCache(KeyValueCache):
    """Keys and values from outside, none before the first pass; `present` has those of this pass behind them."""

    def __init__(self, past: Past) -> None:
        super().__init__()
        self.present: Past = []
        self._past = past
        if past:
            self.lengths = [past[0][0].shape[2]]

    def update(self, keys: Tensor, values: Tensor, block: int, *_: Any) -> tuple[Tensor, Tensor]:
        if self._past:
            held = self._past[block]
            keys, values = torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)
        self.present.append((keys, values))
        return keys, values


class TracedModel(nn.Module):
    """A model as the function that is traced; from now on it computes its attention without a kernel."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        model.spec.set_attention(EAGER)
        self.model = model
        self.positions = model.spec.positions()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: Past) -> tuple[Tensor, Past]:
        """Logits [B, S, V] for `input_ids` [B, S], and the keys and values of all tokens so far.

        Args:
            attention_mask: [B, tokens in `past` + S]; 0 for padding, which stands on the left.
            past: what the pass before gave; in the first pass tensors without tokens, or none.
        """
        cache = GivenCache(past)
        places = cache.longest + torch.arange(input_ids.shape[1]).expand_as(input_ids)
        hidden: Tensor = self.model.embedding((input_ids, places))[0]
        arguments = self.positions.arguments(hidden, places, cache)
        padding = attention_mask[:, None, None] == 0
        for each in arguments.values():
            mask = each["attention_mask"].masked_fill(padding, torch.finfo(hidden.dtype).min)
            each |= {"attention_mask": mask, self.positions.cache_argument: cache, "use_cache": True}
        for block in self.model.blocks:
            output = block.block(hidden, **arguments[block.kind])
            hidden = output[0] if isinstance(output, tuple) else output
        return self.model.head.project(self.model.head.norm(hidden)), cache.present
