"""Embedding, block and head: wrappers of transformers' modules, with what passes from stage to stage.

A micro-batch is the tuple `(hidden [B, S, H], position_ids [B, S] int64)`; the embedding takes `(input_ids [B, S],
position_ids)` and, where it sees them, the tensors of images (`models.images`). Where n processes share rows, hidden
states and input ids are those of S / n tokens. Mixture-of-experts models add a third tensor, their router's running
sums (`models/router.py`). Position ids restart at 0 with each document of a packed row, and a padding token at position
p has -1 - p. Each stage makes masks and rotary angles of them, so that no S x S mask is sent from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from models.attention.cache import KeyValueCache
from models.attention.chunks import HeadGradient, RowChunk
from models.attention.packed import unmarked
from models.attention.positions import Arguments, Positions, attention_kind
from models.family import Family
from models.offload import Offloading, Returns, Trip
from models.parallel.groups import ONE_RANK, RankGroup, copied, gathered
from models.router import RouterRecorder, n_experts, top_k

Activations = tuple[Tensor, ...]


class Embedding(nn.Module):
    """Layer 0: token ids [B, S] -> hidden states [B, S, H], with learned positions where the family has them."""

    recompute = False  # the blocks of a tower of images

    def __init__(self, family: Family, config: PreTrainedConfig, positions: Positions | None = None) -> None:
        super().__init__()
        padding = config.pad_token_id if family.pads_words else None
        self.embed_tokens = nn.Embedding(config.vocab_size, getattr(config, family.word_width), padding)
        self.norm = family.embedding_norm(config) if family.embedding_norm else nn.Identity()
        self.scale = family.embedding_scale(config) if family.embedding_scale else None
        self.rounds_scale = family.rounds_scale
        self.n_experts = n_experts(config) if family.router else 0
        self.dropout = getattr(config, family.embedding_dropout) if family.embedding_dropout else 0.0
        self.first_row, self._positions = family.first_row, positions
        if family.first_row is not None:
            self.context = config.max_position_embeddings
            self.embed_positions = nn.Embedding(self.context + family.first_row, config.hidden_size)

    def embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embed words as blocks take them, but for learned positions."""
        hidden: Tensor = self.embed_tokens(input_ids)
        if self.scale is not None:
            rounded = torch.tensor(self.scale, dtype=hidden.dtype).item() if self.rounds_scale else self.scale
            hidden = hidden * rounded
        normalised: Tensor = self.norm(hidden)
        return normalised

    def forward(self, inputs: Activations) -> Activations:
        input_ids, position_ids, *images = inputs
        if self._positions:
            self._positions.enter(position_ids)
        hidden = self.embedded(input_ids, position_ids, *images)
        if self.first_row is not None:
            own = self._positions.own(position_ids, -1) if self._positions else position_ids
            own = unmarked(own.clamp(min=-self.context))  # padding may lie behind the last row, and takes that
            hidden = hidden + self.embed_positions(own + self.first_row)
        hidden = F.dropout(hidden, self.dropout, self.training)
        if torch.is_grad_enabled() and not hidden.requires_grad:  # frozen; a pipeline sends a gradient to each stage
            hidden.requires_grad_()
        if not self.n_experts:
            return hidden, position_ids
        # The sums need a gradient from the first stage on, as a pipeline sends one back for every tensor.
        sums = torch.zeros(2, self.n_experts, device=hidden.device, requires_grad=torch.is_grad_enabled())
        return hidden, position_ids, sums


class Block(nn.Module):
    """Layers 1..N: one decoder layer of transformers."""

    def __init__(self, family: Family, config: PreTrainedConfig, index: int, positions: Positions | None) -> None:
        super().__init__()
        self.block = family.decoder_layer(config, index)
        for name in family.frozen:
            make_buffer(self.block, name)
        self.kind = attention_kind(config, index)
        self.recompute = False  # in the backward pass
        self.offload: Returns | None = None  # moves what is kept until then to host memory
        self.index = index
        self._positions = positions
        # None in the dense blocks that a family may have.
        routers = (module for name, module in self.block.named_modules() if name == family.router)
        self._recorder = next((RouterRecorder(router, top_k(config)) for router in routers), None)

    def forward(self, activations: Activations, cache: KeyValueCache | None = None) -> Activations:
        hidden, position_ids, *sums = activations
        assert self._positions is not None, "a block built for its shapes cannot run"
        arguments = self._positions(self.kind, hidden, position_ids, cache)
        hidden, added = self._forward(hidden, position_ids, arguments)
        hidden = self._positions.deepened(self.index, hidden)
        return hidden, position_ids, *(total if added is None else total + added for total in sums)

    def _forward(self, hidden: Tensor, position_ids: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor | None]:
        run: Callable[..., tuple[Tensor, Tensor | None]] = self._run
        if self.training and self.recompute:
            run = partial(checkpoint, self._run, use_reentrant=False)
        if not (self.training and self.offload):
            return run(hidden, position_ids, arguments)
        shared = [leaf for leaf in tree_leaves((position_ids, arguments)) if isinstance(leaf, Tensor)]
        with Offloading([*self.parameters(), *shared], Trip(self.offload, self.index)):
            return run(hidden, position_ids, arguments)

    def _run(self, hidden: Tensor, position_ids: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor | None]:
        output = self.block(hidden, **arguments)
        hidden = output[0] if isinstance(output, tuple) else output  # some families also return attention weights
        if self._recorder is None:
            return hidden, None
        kept, part = position_ids >= 0, arguments.get("part_of_rows")
        return hidden, self._recorder.statistics(kept if part is None else part.own(kept, -1))


class Head(nn.Module):
    """Layer N+1: the final norm and the projection to the vocabulary.

    Inside a pipeline (`project_in_loss`) it returns normalised hidden states and leaves the projection to the loss,
    which never holds the logits of all tokens.
    """

    cap: float | None = None  # some families squeeze logits between -cap and cap by a tanh
    scale = 1.0  # of hidden states before the projection
    ranks: RankGroup = ONE_RANK  # each has a shard of the vocabulary
    words = 0  # in the whole vocabulary, where there are several ranks
    positions: Positions | None = None  # of the stage

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        super().__init__()
        self.norm = family.norm(config)
        self.lm_head = nn.Linear(getattr(config, family.word_width), config.vocab_size, bias=family.head_bias)
        self.config = config
        self.project_in_loss = False
        self.ahead: nn.ModuleList | None = None  # layers that predict further ahead, which the loss runs

    def forward(
        self, activations: Activations, loss: Callable[[Activations], Tensor] | None = None
    ) -> Tensor | Activations:
        """Compute logits [B, S, V], or the `loss` of normalised activations.

        ZeRO holds the weight together while this module runs, so a `loss` is called inside.
        """
        if self.positions:
            self.positions.enter(activations[1])
        hidden: Tensor = self.norm(activations[0])
        normalised = (hidden, *activations[1:])
        if self.ahead is not None:  # some begin with what is in front of the norm
            normalised = (*normalised, activations[0])
        if loss is not None:
            return loss(normalised)
        return normalised if self.project_in_loss else self.project(hidden)

    def projection(self) -> Tensor:
        """Get the projection [V, H], or this process's shard of it."""
        return self.lm_head.weight

    @property
    def rows(self) -> RankGroup:
        """Who have the other tokens of the same rows."""
        return self.positions.groups.sequence if self.positions else ONE_RANK

    @property
    def gradient_sum(self) -> HeadGradient | None:
        """What the weight's gradient is summed in with that of the row's other chunks, if it has some."""
        part = self.positions.part if self.positions else None
        return part.head_gradient if isinstance(part, RowChunk) else None

    def summed(self, own: Tensor) -> Tensor:
        """Sum over all tokens of the rows what is summed over those that are here."""
        part = self.positions.part if self.positions else None
        return own if part is None else part.summed(own)

    def scaled(self, hidden: Tensor) -> Tensor:
        """Scale normalised hidden states for the projection."""
        return hidden if self.scale == 1 else hidden * self.scale

    def project(self, hidden: Tensor) -> Tensor:
        """Project normalised hidden states [..., H] to logits [..., V]."""
        hidden = self.scaled(hidden)
        if self.ranks.size > 1:
            hidden = copied(hidden, self.ranks)
        logits = F.linear(hidden, self.projection(), self.lm_head.bias)
        if self.ranks.size > 1:
            logits = gathered(logits, self.ranks, self.words)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class SoftCappedHead(Head):
    """A head with the cap that config.json states, if any."""

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        super().__init__(family, config)
        self.cap = config.final_logit_softcapping


def make_buffer(block: nn.Module, name: str) -> None:
    """Turn a weight, if the block has it, into a buffer without optimizer state."""
    owner, _, leaf = name.rpartition(".")
    for place, module in block.named_modules():
        if place == owner and isinstance(weight := getattr(module, leaf, None), nn.Parameter):
            delattr(module, leaf)
            module.register_buffer(leaf, weight.detach())
