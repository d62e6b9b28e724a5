"""Define a whole sample as text, and which of its characters are trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data.images.marks import Placed, Range


class Span(NamedTuple):
    """Hold a piece of text; `supervised` pieces are trained."""

    text: str
    supervised: bool


class RenderedText(NamedTuple):
    """Hold a sample as text."""

    text: str
    loss: list[Range]  # the trained ranges, in order, none empty, none touching the next
    # What a person has to know of how it was written, each with an example of it.
    notes: dict[str, str] = {}  # nobody changes it
    pieces: tuple[str, ...] = ()  # of a text that is not tokenized at once, but piece by piece
    images: tuple[Placed, ...] = ()  # in order, each with the characters that stand for it


def join(spans: Iterable[Span]) -> RenderedText:
    """Join pieces of text."""
    loss: list[Range] = []
    texts = []
    place = 0
    for text, supervised in spans:
        begin, place = place, place + len(text)
        texts.append(text)
        if supervised:
            loss.append((begin, place))
    return RenderedText("".join(texts), joined(loss))


def without(whole: Range, holes: Sequence[Range]) -> list[Range]:
    """Return what is left of a range."""
    left = []
    begin, end = whole
    for hole in holes:
        left.append((begin, min(hole[0], end)))
        begin = max(begin, hole[1])
    return [each for each in [*left, (begin, end)] if each[0] < each[1]]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges and merge those that touch."""
    done: list[Range] = []
    for begin, end in sorted(ranges):
        if done and begin <= done[-1][1]:
            done[-1] = (done[-1][0], max(end, done[-1][1]))
        elif begin < end:
            done.append((begin, end))
    return done
