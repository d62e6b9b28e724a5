"""Keep in a text where its images stand, from the record to the text that is tokenized.

A mark is the number of an image among those of its record, between two characters that Unicode keeps for a program's
own use and that no text holds. So words may be moved, joined or left out, and every image is still known by its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from data.images.image import Image

IMAGE, END = "\ufdd0", "\ufdd1"
MARK = re.compile(f"{IMAGE}([0-9]+){END}")

Range = tuple[int, int]  # of characters, [begin, end)


class Placed(NamedTuple):
    """Hold an image and all that stands for it, [begin, end): characters of a text, or tokens of a sample."""

    image: Image
    begin: int
    end: int


def mark_of(number: int) -> str:
    """Write the mark of a record's image, counted from 0."""
    return f"{IMAGE}{number}{END}"


def numbers_in(text: str) -> list[int]:
    """Return the numbers of the images in a text, in order."""
    return [int(found[1]) for found in MARK.finditer(text)] if IMAGE in text else []


def words_in(text: str) -> list[str]:
    """Return a text without its images, in the pieces that they leave."""
    return MARK.split(text)[::2] if IMAGE in text else [text]


def parts_of(text: str) -> list[dict[str, Any]]:
    """Write a text with images as the parts that chat templates take."""
    images = [{"type": "image"} for _ in numbers_in(text)]
    words = [{"type": "text", "text": each} for each in words_in(text)]
    both = chain.from_iterable(zip(words, [*images, None], strict=True))
    return [part for part in both if part and part.get("text") != ""]


def replaced(
    text: str, ranges: Sequence[Range], places: Sequence[Range], pieces: Sequence[str]
) -> tuple[str, list[Range], list[Range]]:
    """Put other pieces at some places of a text.

    Args:
        ranges: of the text, to be moved along; a border within a place moves to where its piece begins.
        places: in order, none within another.
        pieces: one for each place.

    Returns:
        The new text, the ranges in it, and where the pieces stand.
    """
    begins, ends = [begin for begin, _ in places], [end for _, end in places]
    between = [text[end:begin] for end, begin in zip([0, *ends], [*begins, len(text)], strict=True)]
    longer = (len(new) - (end - begin) for (begin, end), new in zip(places, pieces, strict=True))
    grown = list(accumulate(longer, initial=0))  # by how much what stands before a place is longer

    def moved(border: int) -> int:
        before = sum(end <= border for end in ends)
        within = before < len(places) and begins[before] < border
        return (begins[before] if within else border) + grown[before]

    new = "".join(chain.from_iterable(zip(between, [*pieces, ""], strict=True)))
    new_begins = [begin + shift for begin, shift in zip(begins, grown, strict=False)]
    stand = [(begin, begin + len(piece)) for begin, piece in zip(new_begins, pieces, strict=True)]
    return new, [(moved(begin), moved(end)) for begin, end in ranges], stand
