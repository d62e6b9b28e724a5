"""What the rest of the program knows of a model that sees images; `models.images` makes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from common.placed_document import PlacedDocument
from models.attention.packed import Documents

if TYPE_CHECKING:
    from models.family import Family


class Beginnings(NamedTuple):
    """How names begin in transformers' whole model of images and text."""

    decoder: str  # of its decoder
    base: str  # of decoder and tower, and of all but the head


@dataclass(frozen=True)
class Sees(ABC):
    """What a model does with images (`models.images`).

    Attributes:
        inputs: the tensors of the model's image processor that its first layer takes, in order.
        image_token: the id whose places the features take.
        axes: 3 for models with positions along three axes, else 0.
        both_ways: the kinds of attention in which the tokens of an image see each other both ways.
        deep: of how many blocks the features of images are added behind, too.
        blind: the family without eyes.
    """

    inputs: tuple[str, ...]
    image_token: int
    axes: int
    both_ways: tuple[str, ...]
    deep: int
    blind: Family = field(repr=False, compare=False)

    @property
    @abstractmethod
    def whole(self) -> Beginnings:
        """How names begin in transformers' whole model."""

    @abstractmethod
    def build(self) -> Any:
        """Build tower and projector, on torch's default device."""

    @abstractmethod
    def pictures(self, images: int, tokens: int, pixels: Callable[..., Tensor]) -> list[Tensor]:
        """Make the tensors of so many images, of about so many tokens each where the model takes any size.

        Args:
            pixels: makes them of their shape.
        """

    @abstractmethod
    def marks_of(self, parts: Iterable[PlacedDocument], shape: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
        """Make what all blocks have to know of a micro-batch [B, S] with images: `axes` and `together` of `Documents`.

        Args:
            parts: its documents; what is in none of them, padding, has plain positions.
        """

    @abstractmethod
    def documents(self, input_ids: Tensor, documents: Documents, images: Sequence[Tensor]) -> Documents:
        """Complete the documents of a micro-batch [B, S] by what its `images`, as the first layer gets them, change."""
