"""Faults of preference training that raise no error: each replaces something while its context is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from data.loader import Loader
from models.adapters import Lora
from options.preference import reference
from options.preference.collation import JudgedCollation
from options.preference.losses import PreferenceLoss


def others_reference() -> AbstractContextManager[Any]:
    """Each sample is compared with the reference's log-probabilities of the next one."""
    find = JudgedCollation._reference_of

    def next_one(self: JudgedCollation, number: int) -> list[float]:
        return find(self, (number + 1) % len(self.data.lengths))

    return patch.object(JudgedCollation, "_reference_of", next_one)


def base_is_reference() -> AbstractContextManager[Any]:
    """The reference is the model without the adapter that the run starts from."""
    compute = reference.log_probabilities

    def without_adapter(*arguments: Any) -> Any:
        with patch.object(Lora, "scale", 0.0):
            return compute(*arguments)

    return patch.object(reference, "log_probabilities", without_adapter)


def answers_exchanged() -> AbstractContextManager[Any]:
    """In the first micro-batch of a step the worse answers count as the better ones."""
    make = Loader.tensors

    def exchanged(self: Loader, batch: Any, replica: int) -> Iterator[Any]:
        first, *others = make(self, batch, replica)
        inputs, (*scales, documents, facts, token_scale) = first
        other_facts = facts.view(-1, 2, 2).flip(1).reshape(-1, 2)
        yield inputs, (*scales, torch.where(documents < 0, documents, documents ^ 1), other_facts, token_scale)
        yield from others

    return patch.object(Loader, "tensors", exchanged)


def prompts_count() -> AbstractContextManager[Any]:
    """The tokens of prompts are trained like those of answers."""
    collate = Loader._collate

    def with_prompts(self: Loader, rows: Any) -> Any:
        input_ids, position_ids, labels = collate(self, rows)
        return input_ids, position_ids, torch.where(position_ids > 0, input_ids, labels)

    return patch.object(Loader, "_collate", with_prompts)


def averages() -> AbstractContextManager[Any]:
    """Log-probabilities are averaged over the tokens of an answer where they have to be summed."""
    add = PreferenceLoss._by_document

    def mean(self: PreferenceLoss, *arguments: Any) -> tuple[Tensor, Tensor]:
        sums, lengths = add(self, *arguments)
        return sums / lengths.clamp(min=1), lengths

    return patch.object(PreferenceLoss, "_by_document", mean)


def same_digest() -> AbstractContextManager[Any]:
    """What is kept of a reference does not tell models apart."""
    return patch.object(reference, "_digest_start", lambda *_: "same")


KINDS = (others_reference, base_is_reference, answers_exchanged, prompts_count, averages, same_digest)
FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {each.__name__: each for each in KINDS}
