"""Where a document of text and images lies in a micro-batch, of which a model makes positions and masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class PlacedDocument(NamedTuple):
    """A document, and its place."""

    row: int  # of the micro-batch
    begin: int  # its first column there
    ids: Tensor  # [L]
    shapes: Mapping[str, Tensor]  # what a processor gives of its images beside their pixels, by name; of none nothing
