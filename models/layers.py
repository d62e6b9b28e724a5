"""The three kinds of layer and what flows between them.

A micro-batch flows through every stage as the tuple `(hidden [B, S, H], position_ids [B, S] int64)`; the embedding
takes `(input_ids [B, S], position_ids)`. Position ids restart at 0 with each document of a packed row, and everything
that depends on who may see whom (causal masks, rotary angles) is derived from them on each stage, so that no S x S
mask ever crosses a stage boundary. The layers wrap transformers' modules and add nothing to their arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedConfig

from models.positions import Positions, attention_kind

if TYPE_CHECKING:
    from models.architectures import Family

Stream = tuple[Tensor, Tensor]


class Embedding(nn.Module):
    """Layer 0: token ids [B, S] -> hidden states [B, S, H], normalised where the family does that."""

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.norm = family.embedding_norm(config) if family.embedding_norm else nn.Identity()

    def forward(self, inputs: Stream) -> Stream:
        input_ids, position_ids = inputs
        return self.norm(self.embed_tokens(input_ids)), position_ids


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
        arguments = self._positions(self.kind, hidden, position_ids, cache)
        if self.recompute and self.training:
            output = checkpoint(self.block, hidden, use_reentrant=False, **arguments)
        else:
            output = self.block(hidden, **arguments)
        hidden = output[0] if isinstance(output, tuple) else output  # some families also return attention weights
        return hidden, position_ids


class Head(nn.Module):
    """Layer N+1: the final norm and the projection to the vocabulary.

    Inside a pipeline (`project_in_loss`) it returns the normalised hidden states and leaves the projection to the loss,
    which needs it only for the supervised positions.
    """

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        super().__init__()
        self.norm = family.norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.project_in_loss = False

    def forward(self, stream: Stream) -> Tensor:
        hidden: Tensor = self.norm(stream[0])
        return hidden if self.project_in_loss else self.project(hidden)

    def project(self, hidden: Tensor) -> Tensor:
        """Normalised hidden states [..., H] -> logits [..., V]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
