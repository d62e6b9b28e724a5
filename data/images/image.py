"""Define an image as a sample keeps it: by its file, never by its pixels."""

from __future__ import annotations

from typing import Any, NamedTuple


class Image(NamedTuple):
    """Hold an image of a sample."""

    path: str  # of its file, absolute
    digest: str  # the first 16 hexadecimal digits of the file's sha256
    width: int  # in pixels, as the model's processor sees it
    height: int
    tokens: int  # of a sample that its features take
    begin: int = 0  # the place of the first of these in the sample
    shape: dict[str, Any] = {}  # what the processor gives beside its pixels in few numbers, such as a grid: [1, ...]
