"""Ranges of characters [begin, end), as loss is laid on a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from data.prompts import Span

Range = tuple[int, int]


def ranges_of(spans: Iterable[Span], origin: int, supervised: bool, inside: Range) -> list[Range]:
    """Where the pieces with or without loss lie in a text.

    Args:
        origin: where the first piece begins.
        inside: what lies outside of this range is cut off.
    """
    found = []
    for span in spans:
        begin, origin = origin, origin + len(span.text)
        if span.supervised == supervised:
            found.append((max(begin, inside[0]), min(origin, inside[1])))
    return [each for each in found if each[0] < each[1]]


def without(whole: Range, holes: Sequence[Range]) -> list[Range]:
    """What is left of a range."""
    left = []
    begin, end = whole
    for hole in holes:
        left.append((begin, min(hole[0], end)))
        begin = max(begin, hole[1])
    return [each for each in [*left, (begin, end)] if each[0] < each[1]]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """In order; those that touch are one."""
    done: list[Range] = []
    for begin, end in sorted(ranges):
        if done and begin <= done[-1][1]:
            done[-1] = (done[-1][0], max(end, done[-1][1]))
        elif begin < end:
            done.append((begin, end))
    return done
