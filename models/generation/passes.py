"""Forward passes of texts under way, and what the model remembers of them.

Texts that take their tokens together are the rows of a group. Who generates gives passes and takes their logits in the
same order, so that several may be under way: a model in one process computes a pass when its logits are taken, one in
several stages (`training.demo.stages`) as soon as it is given.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from models.causal_lm import CausalLM
from models.errors import CheckpointError
from models.generation.cache import KeyValueCache


class Pass(NamedTuple):
    """A forward pass of some rows of a group."""

    group: int
    kept: list[int]  # the rows of the group that stay, in this order, before anything else
    texts: list[list[int]]  # a piece of text for each row, equally long
    arriving: bool  # the piece is a row of its own, which joins the others; else it follows what the rows have


class Passes:
    """What a model with a head computes for groups of rows, whose passes may be under way at the same time.

    Raises:
        CheckpointError: the family cannot.
    """

    def __init__(self, model: CausalLM, groups: int = 1) -> None:
        if not model.spec.family.generates:
            raise CheckpointError(
                f"{model.spec.family.name}: tokens one by one are not transformers'; expected an export that "
                "transformers generates with"
            )
        self.spec = model.spec
        self.groups = groups
        self._model = model
        self._weight = next(model.parameters())
        self._caches = [KeyValueCache(rows=0) for _ in range(groups)]
        self._given: deque[Pass] = deque()

    def give(self, work: Pass) -> None:
        """Ask for a pass.

        Raises:
            CheckpointError: the model does not know a token.
        """
        largest, known = max(map(max, work.texts)), self.spec.config.vocab_size
        if largest >= known:
            raise CheckpointError(
                f"vocab_size: the tokenizer gives token {largest}, but the model has {known}; "
                "expected the tokenizer of this model"
            )
        self._given.append(work)

    def take(self) -> Tensor:
        """What follows each row of the first pass that was given and not taken, fp32 [rows, V].

        Raises:
            CheckpointError: the numbers are not finite.
        """
        logits = self.logits(self.compute(self._given.popleft()))
        if not torch.isfinite(logits.amax(dim=-1)).all():
            raise CheckpointError("the model's output is not finite: its weights hold NaN or infinity")
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the last token of each row, fp32 [rows, V], from the hidden states behind the last block."""
        logits: Tensor = self._model.head.project(self._model.head.norm(hidden[:, -1])).float()
        return logits

    def forget(self) -> None:
        """Let nothing be under way that nobody took."""
        self._given.clear()

    def compute(self, work: Pass) -> Tensor:
        """The hidden states [rows, length, H] behind the last block here."""
        inputs, cache = self.inputs(work), self._caches[work.group]
        cache.select(work.kept)
        if not work.arriving:
            return self._model.stream(inputs, cache=cache)[0]
        own = KeyValueCache()
        hidden = self._model.stream(inputs, cache=own)[0]
        cache.append(own)
        return hidden

    def inputs(self, work: Pass) -> Tensor:
        """What the first layer here takes: token ids [rows, length]."""
        return torch.tensor(work.texts, device=self._weight.device)
