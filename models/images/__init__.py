"""Models of images and text: transformers' tower and projector as a part of the first layer.

`seeing` gives a spec its eyes, proven against transformers' whole model. A run without images does not call it.
"""

from __future__ import annotations

from models.images.eyes import Eyes
from models.images.seeing import frozen, reached, seeing

__all__ = ["Eyes", "frozen", "reached", "seeing"]
