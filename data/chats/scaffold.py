"""What a chat template writes around the words of a dialogue: made once for all dialogues of one structure.

A scaffold is the rendered text of stand-ins, cut into literal text and slots. Laid onto the rendered text of a real
dialogue, it tells where each turn's words stand, and it checks every character on the way: where one does not fit, the
template looks at the words, and `place` says so by giving None. That costs a few comparisons of strings, so masks are
exact at the price of one rendering a record.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from data.chats.marks import CONTENT, Leaf, Place, Unplaceable, words_of
from data.chats.messages import JSON, Said
from data.chats.turns import Turn, agreement

# Two sets of tools that begin, end and read as differently as tools can: what the template writes of them is where
# the two texts differ.
_SHAPE: JSON = {"type": "object", "properties": {"pq": {"type": "string", "description": "dq"}}, "required": ["pq"]}
_OTHER: JSON = {"required": [], "properties": {"rw": {"description": "ew", "type": "integer"}}, "type": "object"}
SOME_TOOLS: list[JSON] = [{"type": "function", "function": {"name": "nq", "description": "dq", "parameters": _SHAPE}}]
OTHER_TOOLS: list[JSON] = [
    {"function": {"parameters": _OTHER, "description": "ew", "name": "mw"}, "type": "function"},
]


class Offset(NamedTuple):
    """A place in a scaffold: so many characters after the beginning of a literal."""

    literal: int
    characters: int


class Placed(NamedTuple):
    """A turn in a rendered text.

    Attributes:
        message: its number.
        parts: ranges [begin, end) that the model writes.
        ended: a token ends it.
        words: where the first character of what was said would stand, had the template stripped none, and the range of
            what is left of it; None if unknown.
    """

    message: int
    parts: list[tuple[int, int]]
    ended: bool
    words: tuple[int, int, int] | None


class Scaffold:
    """The text around the words.

    Args:
        text: rendered stand-ins.
        places: of the words in it, in order.
        turns: found in it.
        tools: the range that describes the tools, if any.

    Raises:
        Unplaceable: turns, words or tools overlap.
    """

    def __init__(
        self, text: str, places: Sequence[Place], turns: Sequence[Turn], tools: tuple[int, int] | None = None
    ) -> None:
        cuts: list[tuple[int, int, Place | None]] = [(place.start, place.end, place) for place in places]
        if tools:
            cuts.append((*tools, None))
        cuts.sort(key=lambda cut: cut[:2])
        self._slots = [place for _, _, place in cuts]
        begins, ends = [0, *(end for _, end, _ in cuts)], [*(start for start, _, _ in cuts), len(text)]
        if any(begin > end for begin, end in zip(begins, ends, strict=True)):
            raise Unplaceable
        self._literals = [text[begin:end] for begin, end in zip(begins, ends, strict=True)]
        self._length = sum(map(len, self._literals))

        def offset(place: int) -> Offset:
            literal = bisect_left(ends, place)
            if place < begins[literal]:
                raise Unplaceable
            return Offset(literal, place - begins[literal])

        self._turns = [
            (turn, [(offset(begin), offset(end)) for begin, end in turn.parts], self._content_slot(turn.message))
            for turn in turns
        ]

    def place(self, said: Sequence[Said], text: str) -> list[Placed] | None:
        """The turns of a dialogue in its rendered text; None where that is not this scaffold with the dialogue's words.

        Args:
            said: messages of the scaffold's structure.
        """
        written: list[str] = []
        cut: list[int] = []  # characters stripped from the words' beginning
        for slot in self._slots:
            words = "" if slot is None else words_of(said, slot.leaf)
            length = 0
            if slot is None:
                pass
            elif slot.as_json:
                words = json.dumps(words, ensure_ascii=False)
            elif slot.strip != ("", ""):
                left, right = slot.strip
                whole = len(words)
                words = words if left == "" else words.lstrip(left)
                length = whole - len(words)
                words = words if right == "" else words.rstrip(right)
            written.append(words)
            cut.append(length)
        tools = len(text) - self._length - sum(map(len, written))
        position = 0
        starts = []
        for literal, slot, words in zip(self._literals, [*self._slots, None], [*written, ""], strict=True):
            starts.append(position)
            if not text.startswith(literal, position):
                return None
            position += len(literal)
            if slot is not None:
                if not text.startswith(words, position):
                    return None
                position += len(words)
            elif len(starts) < len(self._literals):
                position += tools
        if position != len(text) or tools < 0 or (tools > 0 and None not in self._slots):
            return None
        placed = []
        for turn, parts, slot_number in self._turns:
            words = None
            if slot_number is not None:
                begin = starts[slot_number] + len(self._literals[slot_number])
                words = begin - cut[slot_number], begin, begin + len(written[slot_number])
            ranges = [(starts[a] + begin, starts[b] + end) for (a, begin), (b, end) in parts]
            placed.append(Placed(turn.message, ranges, turn.ended, words))
        return placed

    def _content_slot(self, message: int) -> int | None:
        return next(
            (
                number
                for number, slot in enumerate(self._slots)
                if slot and slot.leaf.message == message and slot.leaf.part == CONTENT and not slot.as_json
            ),
            None,
        )


def tools_between(text: str, other: str) -> tuple[int, int] | None:
    """Where a text that was made with SOME_TOOLS differs from one with OTHER_TOOLS; None where it does not."""
    if text == other:
        return None
    begin = agreement(text, other)
    longest = min(len(text), len(other)) - begin
    end = agreement(text[::-1][:longest], other[::-1][:longest])
    return begin, len(text) - end


def placed_by_marks(said: Sequence[Said], text: str, places: Sequence[Place], turns: Sequence[Turn]) -> list[Placed]:
    """Turns that were found in a text with marks around its words, as they lie in the text without them.

    Args:
        said: the messages without marks.
        text: what the template makes of them.
        places: of all marks.
    """
    ends = [place.after for place in places]
    gone = [0, *accumulate(len(place.mark) for place in places)]

    def unmarked(place: int) -> int:
        return place - gone[bisect_right(ends, place)]

    placed = []
    for turn in turns:
        words = said[turn.message].text
        core = words.strip()
        found = None
        if marks := [place for place in places if place.leaf == Leaf(turn.message, CONTENT)]:
            begin = unmarked(marks[-1].start) - len(core)  # the last mark is the one behind the words
            if text.startswith(core, begin):
                found = begin - words.index(core), begin, begin + len(core)
        parts = [(unmarked(begin), unmarked(end)) for begin, end in turn.parts]
        placed.append(Placed(turn.message, parts, turn.ended, found))
    return placed
