"""Where an assistant's turn begins and ends in what a chat template writes.

A model writes all that stands between the prompt it is asked with and the end of its turn: the words, and what the
template puts around them (an empty thinking block, the frame of a call). So a turn begins where the prompt for it ends:
the dialogue up to there is rendered with `add_generation_prompt`, and what follows the last mark in it is compared with
what follows the same mark in the whole text. It ends with the end-of-turn token, looked for between the turn's last
mark and where the dialogue up to and with this turn, rendered, ceases to agree. Only what follows a mark is compared,
never whole prefixes, since templates rewrite what lies further back (earlier thoughts are dropped, tools move).

Where a template says by itself what is generated (`{% generation %}`), that is taken instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from data.chats.marks import CALL_ID, CONTENT, NAME, WORDS, Place, Unplaceable, says, structure
from data.chats.messages import Said

Render = Callable[..., str]  # messages -> text; `asking=True` adds the generation prompt
Offsets = tuple[int, int, bool]


class Vocabulary(NamedTuple):
    """The tokens that a template may write between words.

    Attributes:
        special: matches any special token.
        any: matches special tokens first, then the other added ones.
    """

    special: re.Pattern[str]
    any: re.Pattern[str]

    def leading(self, text: str) -> int:
        """Length of the token that a text begins with, white space before it included; 0 where there is none."""
        place = len(text) - len(text.lstrip())
        found = self.special.match(text, place) or self.any.match(text, place)
        return found.end() if found else 0


def agreement(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


class Turn(NamedTuple):
    """An assistant's message in a rendered text.

    Attributes:
        message: its number.
        parts: ranges [begin, end) that the model writes.
        ended: a token ends it.
    """

    message: int
    parts: list[tuple[int, int]]
    ended: bool


class TurnFinder:
    """Finds turns in the texts of one template; turns that look alike are looked at once.

    Args:
        vocabulary: of the tokenizer.
        end_of_turn: the token after an answer; None where it is not known.
        strict: a prompt has to agree with the dialogue. Else, where it does not, a turn begins with its words.
    """

    def __init__(self, vocabulary: Vocabulary, end_of_turn: str | None = None, strict: bool = False) -> None:
        self._vocabulary = vocabulary
        self._strict = strict
        self.end_of_turn = end_of_turn
        self._known: dict[Any, Offsets] = {}

    def find(self, text: str, places: Sequence[Place], said: Sequence[Said], render: Render) -> list[Turn]:
        """All assistants' turns of a text that was made of marked messages.

        Args:
            places: of the marks in the text.
            said: the marked messages.

        Raises:
            Unplaceable: a turn cannot be told from what is around it.
        """
        anchors = [place for place in places if place.leaf.part != CALL_ID]
        entries = structure(said)
        turns = []
        for number, each in enumerate(said):
            if each.role != "assistant":
                continue
            own = [place for place in anchors if place.leaf.message == number]
            _check_complete(own, each)
            earlier = [place for place in anchors if place.leaf.message < number]
            later = [place.start for place in anchors if place.leaf.message > number]
            anchor = earlier[-1] if earlier else None
            before = text[anchor.after if anchor else 0 : own[0].start]
            behind = text[own[-1].after : min([place for place in later if place > own[-1].start], default=None)]
            # What the offsets depend on: a turn that agrees with an earlier one in it needs no rendering.
            key = (before, behind, own[0].leaf.part, entries[max(number - 1, 0) : number + 2], number == 0)
            if key not in self._known:
                begin = self._begin(
                    before, text[anchor.after :] if anchor else text, anchor, own[0], number, said, render
                )
                self._known[key] = (begin, *self._end(behind, own[-1], number, said, render))
            begin, end, ended = self._known[key]
            begin += anchor.after if anchor else 0
            end = own[-1].after + end if end else own[-1].end
            if not begin <= own[0].after or any(begin < place.end <= end for place in anchors if place not in own):
                raise Unplaceable
            turns.append(Turn(number, [(begin, end)], ended))
        return turns

    def _begin(
        self,
        before: str,
        text: str,
        anchor: Place | None,
        first: Place,
        number: int,
        said: Sequence[Said],
        render: Render,
    ) -> int:
        """Where the turn begins, counted from the anchor."""
        mark = anchor.mark if anchor else ""
        asked = render(said[:number], asking=True) if number else ""
        at = (asked.rfind(mark) if mark else 0) if asked else -1
        prompt = asked[at + len(mark) :]
        if at >= 0 and text.startswith(prompt):
            return len(prompt)
        words_first = first.leaf.part in WORDS and first.opens
        if words_first and (at < 0 or not self._strict):
            return len(before)
        # The prompt may end with more than the dialogue goes on with (an opened thought), but only that may differ.
        agreed = agreement(prompt, before)
        unasked = render(said[:number])
        if at < 0 or not asked.startswith(unasked) or agreed < len(unasked) - at - len(mark):
            raise Unplaceable
        if words_first:
            return len(before)
        return next((token.start() for token in self._vocabulary.any.finditer(before) if token.end() > agreed), agreed)

    def _end(self, behind: str, last: Place, number: int, said: Sequence[Said], render: Render) -> tuple[int, bool]:
        """Where the turn ends, counted from its last mark (0: with its words), and whether a token ends it."""
        if last.leaf.part in WORDS:
            length = self._vocabulary.leading(behind)
            return length, bool(length)
        upto = render(said[: number + 1])
        at = upto.rfind(last.mark)
        rest = upto[at + len(last.mark) :] if at >= 0 else behind
        agreed = agreement(rest, behind)
        if self.end_of_turn and (place := behind.rfind(self.end_of_turn, 0, agreed)) >= 0:
            return place + len(self.end_of_turn), True
        tokens = list(self._vocabulary.special.finditer(behind, 0, agreed))
        if tokens:
            return tokens[-1].end(), True
        length = self._vocabulary.leading(behind[agreed:]) if agreed == len(rest) else 0
        return len(behind[:agreed].rstrip()) if not length else agreed + length, bool(length)


def generated(turns: list[Turn], spans: list[tuple[int, int]], text: str, vocabulary: Vocabulary) -> list[Turn]:
    """The turns with the parts that the template itself marks as generated, and the token that ends them.

    Raises:
        Unplaceable: a marked part lies in no turn.
    """
    parts: dict[int, list[tuple[int, int]]] = {turn.message: [] for turn in turns}
    for begin, end in spans:
        turn = next((turn for turn in turns if begin < turn.parts[0][1] and turn.parts[0][0] < end), None)
        if turn is None:
            raise Unplaceable
        parts[turn.message].append((begin, end))
    done = []
    for turn in turns:
        if own := parts[turn.message]:
            begin, end = own[-1]
            closed = any(token.end() == len(text[:end].rstrip()) for token in vocabulary.any.finditer(text, begin, end))
            own[-1] = (begin, end if closed else end + vocabulary.leading(text[end:]))
        done.append(turn._replace(parts=own, ended=turn.ended or not own))
    return done


def _check_complete(own: list[Place], said: Said) -> None:
    """What a message says is there: its words once, the names of its calls."""
    words = {place.mark for place in own if place.leaf.part == CONTENT}
    calls = {place.leaf.call for place in own if place.leaf.part == NAME}
    if not own or (says(said) and not words) or len(calls) < len(said.calls):
        raise Unplaceable
