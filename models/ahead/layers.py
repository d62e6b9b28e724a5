"""The layers that predict further ahead: DeepSeek-V3's formula (arXiv:2412.19437, section 2.2).

With h[0] the hidden state behind the final norm, and t counting inside of one document,

    x[k][t] = joined( concat( embedding_norm(embed(token[t + k])), hidden_norm(h[k - 1][t]) ) )
    h[k][t] = norm( decoder layer( x[k] )[t] ),      logits[k][t] = head(h[k][t]),      target: token[t + k + 1]

where embedding and head are the model's own. Where a checkpoint has no norm of its own behind the decoder layer
(ERNIE 4.5), h[0] is the state in front of the final norm, the next layer gets the state without a norm, and the head
gets it behind the final norm. Attention is the model's, with its masks and angles: as these are relative, the position
t serves as well as t + k.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.ahead.names import Naming
from models.attention.cache import KeyValueCache
from models.attention.positions import LINEAR, Positions, attention_kind
from models.errors import CheckpointError
from models.family import Family, Rule
from models.layers import Block

HIDDEN_FIRST = "mtp_hidden_states_first"  # in config.json: the halves exchanged, as Inkling has them
SHARED_NORM = "chain_hidden_post_norm"  # one norm for all layers ahead, or none


class LayerAhead(nn.Module):
    """One of the layers: a decoder layer of the family's, with what joins its inputs, and a norm behind it, if any."""

    def __init__(
        self, family: Family, config: PreTrainedConfig, index: int, positions: Positions | None, has_norm: bool
    ) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = family.norm(config), family.norm(config)
        self.joined = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.decoder = Block(family, config, index, positions)
        self.norm = family.norm(config) if has_norm else None

    def forward(
        self, embedded: Tensor, hidden: Tensor, position_ids: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Compute h[k] of h[k - 1], both [B, S, H].

        Args:
            embedded: [B, S, H], embeddings of the tokens k further on.
            position_ids: [B, S] of the whole rows, as for any block.
            cache: of this layer's own keys and values, in generation.
        """
        return self.through(embedded, hidden, lambda inputs: self.decoder((inputs, position_ids), cache)[0])

    def through(self, embedded: Tensor, hidden: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the same with `decode` in the place of the decoder layer, which a plan runs in a way of its own."""
        halves = self.embedding_norm(embedded), self.hidden_norm(hidden)
        output = decode(self.joined(torch.cat(halves, dim=-1)))
        return output if self.norm is None else self.norm(output)


@dataclass(frozen=True)
class Ahead:
    """The declaration of a model's layers ahead."""

    naming: Naming
    depth: int

    def build(self, family: Family, config: PreTrainedConfig, positions: Positions | None) -> nn.ModuleList:
        """Build the layers, as `ahead` of the last layer."""
        index, config = self._like(config)
        has_norm = not self.naming.before_norm
        return nn.ModuleList(LayerAhead(family, config, index, positions, has_norm) for _ in range(self.depth))

    def rules(self, family: Family, n_blocks: int) -> tuple[Rule, ...]:
        """Make the naming table; arguments as of `Naming.rules`."""
        each = (self.naming.rules(family, n_blocks, k) for k in range(self.depth))
        return tuple(chain.from_iterable(each))

    def _like(self, config: PreTrainedConfig) -> tuple[int, PreTrainedConfig]:
        """Find a block of the model that these layers are like, and the config that it is built with."""
        for name in (HIDDEN_FIRST, SHARED_NORM):
            if hasattr(config, name):
                raise CheckpointError(f"config.json: {name}: another formula than the one that Pipetune knows")
        index = last_with_attention(config)

        # transformers' `get_mtp_config` does the first; ERNIE's layer is a dense one.
        changes = {"first_k_dense_replace": 0}
        if self.naming.dense:
            changes = {"moe_layer_start_index": int(config.num_hidden_layers) + 1}
        config = copy(config)
        for name, value in changes.items():
            if hasattr(config, name):
                setattr(config, name, value)
        return index, config


def last_with_attention(config: PreTrainedConfig) -> int:
    """Find the last block (from 0) with attention, which layers ahead are like.

    Raises:
        CheckpointError: there is none.
    """
    for index in reversed(range(int(config.num_hidden_layers))):
        if attention_kind(config, index) != LINEAR:
            return index
    raise CheckpointError("no block has attention, which layers that predict ahead need")
