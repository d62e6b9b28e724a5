"""What a chat template writes around the words of simple dialogues, remembered.

Most dialogues have messages of plain words, and many have the same roles in the same order. The text around their words
is the same for all of them, unless the template looks at the words. So the first one's is kept: where it and the words
of the next one make exactly the text that the template writes, the turns are where they were, and no second rendering
with marks is needed. Where they do not, nothing is concluded.

Cost: a few microseconds a dialogue, where marks cost 150.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from data.chat.loss_mask import Turn
from data.chat.marks import Marked
from data.chat.messages import Said

MOST_MESSAGES = 64
Place = tuple[int, int]  # a piece of text, and characters from its beginning


class Frame(NamedTuple):
    """The text around the words of dialogues with certain roles."""

    # Literal text, and in its gaps the numbers of the messages whose words stand there, in turn.
    pieces: list[str | int]
    # Message, parts, whether a token ends it, and the piece that holds its words.
    turns: list[tuple[int, list[tuple[Place, Place]], bool, int]]
    notes: dict[str, str]  # on all such dialogues


def frame_key(said: Sequence[Said]) -> tuple[str, ...] | None:
    """What dialogues have in common that may have the same frame; None where there is more than plain words."""
    if len(said) > MOST_MESSAGES:
        return None
    for each in said:
        text = each.text
        # A result of a tool has an id and a name.
        if not text or text[0].isspace() or text[-1].isspace() or each.reasoning or each.calls or each.role == "tool":
            return None
    return tuple([each.role for each in said])


def frame_of(whole: Marked, turns: Sequence[Turn], notes: dict[str, str]) -> Frame | None:
    """The frame of a dialogue; None where some words are missing, moved or written twice."""
    pieces: list[str | int] = []
    starts = []
    end = 0
    for opening, closing in zip(whole.marks[::2], whole.marks[1::2], strict=False):
        if opening.leaf != closing.leaf or not opening.opens or closing.opens:
            return None
        pieces += [whole.text[end : opening.at], opening.leaf.message]
        starts += [end, opening.at]
        end = closing.at
    pieces.append(whole.text[end:])
    starts.append(end)
    words = {message: piece for piece, message in enumerate(pieces) if isinstance(message, int)}
    if len(whole.marks) % 2 or len(words) != len(pieces) // 2 or not {turn.message for turn in turns} <= words.keys():
        return None

    def place(at: int) -> Place:
        """In the literal text, not in the words: these have another length in each dialogue."""
        piece = bisect_right(starts, at) - 1
        if piece % 2 and at > starts[piece]:
            raise ValueError
        if piece % 2:
            piece -= 1
        return piece, at - starts[piece]

    try:
        placed = [
            (turn.message, [(place(a), place(b)) for a, b in turn.parts], turn.ended, words[turn.message])
            for turn in turns
        ]
    except ValueError:
        return None
    return Frame(pieces, placed, notes)


def turns_in(frame: Frame, said: Sequence[Said], text: str) -> tuple[list[Turn], dict[str, str]] | None:
    """The turns of a dialogue in its rendered text, and the notes on them.

    None where this is not the frame with the dialogue's words.
    """
    pieces = [said[piece].text if isinstance(piece, int) else piece for piece in frame.pieces]
    if "".join(pieces) != text:
        return None
    starts = [0, *accumulate(map(len, pieces))]
    turns = [
        Turn(
            message,
            [(starts[first] + a, starts[last] + b) for (first, a), (last, b) in parts],
            ended,
            (starts[words], starts[words + 1]),
        )
        for message, parts, ended, words in frame.turns
    ]
    return turns, frame.notes
