"""Mark the words of a dialogue to find them again in the rendered text.

A mark is letters and digits, so that no escaping of JSON or HTML changes it, and stands inside of the white space
that a template may strip. The template writes the marked dialogue; where its text without the marks is the text of the
dialogue itself, character by character, the marks tell exactly where each word stands. A template that looks at the
words (or changes them) gives itself away by another text.

Most dialogues have messages of plain words, and many have the same roles in the same order. The text around their words
is the same for all of them, unless the template looks at the words. So the first one's is kept as a `Frame`: where it
and the words of the next one make exactly the text that the template writes, the turns are where they were, and no
second rendering with marks is needed. Where they do not, nothing is concluded.

Cost: 150 microseconds a dialogue; a few where there is a frame.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, count, product
from typing import Any, NamedTuple

from data.chat.messages import Call, Said

CONTENT, REASONING, NAME, ARGUMENTS, TOOL = "content", "reasoning", "name", "arguments", "tool"
MOST_MESSAGES = 64  # of dialogues that are thought to have a frame


class Leaf(NamedTuple):
    """Identify words: message number, part, and call within the message."""

    message: int
    part: str
    call: int = 0


class Mark(NamedTuple):
    """Hold a mark's place in the text without marks."""

    number: int  # of the pair that it belongs to
    leaf: Leaf
    opens: bool  # the words begin here; else they end
    at: int
    edge: int  # `at`, with the words' own white space beside it


class Marked(NamedTuple):
    """Hold a rendered text without its marks, and the marks in order."""

    text: str
    marks: list[Mark]


class Turn(NamedTuple):
    """Locate an assistant's message in a rendered text."""

    message: int  # its number
    parts: list[tuple[int, int]]  # ranges [begin, end) that the model writes
    ended: bool  # a token ends it
    words: tuple[int, int] | None  # the range of its words; None where they are not one range


class Frame(NamedTuple):
    """Hold the text around the words for dialogues with the same roles."""

    text: str  # of that one
    words: list[tuple[int, int, int]]  # where its words begin and end, and the number of their message, in order
    turns: list[Turn]  # in it
    notes: dict[str, str]  # on all such dialogues


class Markers:
    """Put marks around a dialogue's words.

    Args:
        text: the marks are none of its words.
        everybody: mark all words; else those of the assistant.
        empty: mark empty messages too; a template may take them for others then.
    """

    def __init__(self, said: Sequence[Said], text: str, everybody: bool = True, empty: bool = False) -> None:
        self.leaves: list[Leaf] = []  # what each pair of marks stands around
        self._empty = empty
        self._around: list[tuple[str, str]] = []
        self._salt = "zq0x" if "zq0x" not in text else next(s for n in count(1) if (s := f"zq{n}x") not in text)
        self._pattern = re.compile(self._salt + r"([ab])(\d+)q")
        self.said = [  # with marks
            self._mark(number, message) if everybody or message.role == "assistant" else message
            for number, message in enumerate(said)
        ]

    def read(self, text: str) -> Marked:
        """Take the marks out of a text rendered from the marked messages."""
        pieces = []
        found = []
        length = last = 0
        for mark in self._pattern.finditer(text):
            start, end = mark.span()
            pieces.append(text[last:start])
            length, last = length + start - last, end
            found.append((int(mark.group(2)), mark.group(1) == "a", length))
        pieces.append(text[last:])
        plain = "".join(pieces)

        # The white space of words stands outside of their marks; a template may strip some of it.
        marks = []
        for number, opens, at in found:
            lead, trail = self._around[number]
            edge = at
            if opens and lead:
                edge -= next(len(lead) - cut for cut in range(len(lead) + 1) if plain.endswith(lead[cut:], 0, at))
            elif trail and not opens:
                edge += next(cut for cut in range(len(trail), -1, -1) if plain.startswith(trail[:cut], at))
            marks.append(Mark(number, self.leaves[number], opens, at, edge))
        return Marked(plain, marks)

    def _mark(self, message: int, said: Said) -> Said:
        def wrap(words: str, part: str, call: int = 0) -> str:
            core = words.strip()
            if not core and not (self._empty and part == CONTENT and not said.calls):
                return words
            begin = words.index(core) if core else len(words)
            end = begin + len(core)
            mark = f"{len(self.leaves)}q"
            self.leaves.append(Leaf(message, part, call))
            self._around.append((words[:begin], words[end:]))
            return f"{words[:begin]}{self._salt}a{mark}{core}{self._salt}b{mark}{words[end:]}"

        def wrap_all(value: Any, call: int) -> Any:
            if isinstance(value, str):
                return wrap(value, ARGUMENTS, call)
            if isinstance(value, list):
                return [wrap_all(each, call) for each in value]
            if isinstance(value, dict):
                return {key: wrap_all(each, call) for key, each in value.items()}
            return value

        calls = tuple(
            Call(call.id, wrap(call.name, NAME, place), wrap_all(call.arguments, place))
            for place, call in enumerate(said.calls)
        )
        return said._replace(
            text=wrap(said.text, CONTENT),
            reasoning=wrap(said.reasoning, REASONING),
            calls=calls,
            name=said.name and wrap(said.name, TOOL),
        )


def own_marks(marks: Sequence[Mark]) -> dict[int, tuple[int, int]]:
    """Find each message's first and last mark, up to where one is repeated (as in a result's header)."""
    own: dict[int, tuple[int, int]] = {}
    seen: set[tuple[int, bool]] = set()
    for place, mark in enumerate(marks):
        if (mark.number, mark.opens) in seen:
            continue
        seen.add((mark.number, mark.opens))
        message = mark.leaf.message
        own[message] = (own[message][0] if message in own else place, place)
    return own


def frame_key(said: Sequence[Said]) -> tuple[str, ...] | None:
    """Return the key of dialogues that may share a frame; None if there is more than plain words."""
    if len(said) > MOST_MESSAGES:
        return None
    for message in said:
        text = message.text
        if not text or text[0].isspace() or text[-1].isspace():
            return None
        if message.reasoning or message.calls or message.role == "tool":  # a result of a tool has an id and a name
            return None
    return tuple([message.role for message in said])


def frame_of(whole: Marked, turns: Sequence[Turn], notes: dict[str, str]) -> Frame | None:
    """Make a dialogue's frame; None if words are missing, moved or written twice."""
    words = []
    for opening, closing in zip(whole.marks[::2], whole.marks[1::2], strict=False):
        if opening.leaf != closing.leaf or not opening.opens or closing.opens:
            return None
        words.append((opening.at, closing.at, opening.leaf.message))
    messages = {message for *_, message in words}
    if len(whole.marks) != 2 * len(messages) or not {turn.message for turn in turns} <= messages:
        return None

    # A turn that begins or ends among words does so elsewhere in each dialogue.
    parts = chain.from_iterable(turn.parts for turn in turns)
    borders = chain.from_iterable(parts)
    if any(begin < border < end for border, (begin, end, _) in product(borders, words)):
        return None
    return Frame(whole.text, words, list(turns), notes)


def turns_in(frame: Frame, said: Sequence[Said], text: str) -> tuple[list[Turn], dict[str, str]] | None:
    """Find a dialogue's turns in its rendered text by a frame, and the notes on them.

    None where this is not the frame with the dialogue's words.
    """
    # The frame's text with these words in it, and how far what stands behind each of them is moved.
    pieces, ends, shifts, last = [], [], [0], 0
    for begin, end, message in frame.words:
        words = said[message].text
        pieces += [frame.text[last:begin], words]
        ends.append(last := end)
        shifts.append(shifts[-1] + len(words) - (end - begin))  # of what stands behind these words
    if "".join([*pieces, frame.text[last:]]) != text:
        return None

    def moved(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(a + shifts[bisect_right(ends, a)], b + shifts[bisect_right(ends, b)]) for a, b in ranges]

    turns = [
        Turn(turn.message, moved(turn.parts), turn.ended, turn.words and moved([turn.words])[0]) for turn in frame.turns
    ]
    return turns, frame.notes
