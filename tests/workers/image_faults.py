"""Faults of training on images that raise no error; each replaces something for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from data.collation import Marks
from data.images.collation import SeeingCollation
from data.loader import Loader
from models.images.embedding import SeeingEmbedding


def images_exchanged() -> None:
    """Images of a micro-batch stand in each other's places."""
    find = SeeingCollation._of
    SeeingCollation._of = lambda self, rows: find(self, rows)[::-1]  # type: ignore[method-assign]


def placeholder_trained() -> None:
    """The tokens of images are learnt."""
    embed = Loader._collate

    def learnt(self: Loader, rows: Any) -> tuple[Tensor, ...]:
        input_ids, position_ids, labels = embed(self, rows)
        images = self.collation._of(rows) if isinstance(self.collation, SeeingCollation) else []
        if images:
            token = max(input_ids.flatten().tolist())  # the small model has it at the end of its vocabulary
            following = torch.cat([input_ids[:, 1:], input_ids[:, :1]], dim=1)
            labels = torch.where(following == token, following, labels)
        return input_ids, position_ids, labels

    Loader._collate = learnt  # type: ignore[method-assign, assignment]


def axis_short() -> None:
    """Positions have one axis less: the width is where the height is."""
    make = SeeingCollation.marks

    def short(self: SeeingCollation, *words: Any) -> Iterator[Marks]:
        for axes, together in make(self, *words):
            yield Marks(None if axes is None else axes[[0, 1, 1]], together)

    SeeingCollation.marks = short  # type: ignore[method-assign, assignment]


def features_reordered() -> None:
    """The features of images come in another order."""
    embed = SeeingEmbedding.embedded

    def reordered(self: SeeingEmbedding, input_ids: Tensor, position_ids: Tensor, *images: Tensor) -> Tensor:
        hidden = embed(self, input_ids, position_ids, *images)
        places = input_ids == self.sees.image_token
        return hidden.masked_scatter(places[..., None], hidden[places].flip(0))

    SeeingEmbedding.embedded = reordered  # type: ignore[method-assign]


KINDS = (images_exchanged, placeholder_trained, axis_short, features_reordered)
FAULTS: dict[str, Callable[[], None]] = {each.__name__: each for each in KINDS}
