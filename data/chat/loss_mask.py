"""Find where an assistant's turn begins and ends in a rendered text: what is trained.

A model writes all that stands between the prompt it is asked with and the end of its turn: the words, and what the
template puts around them (an empty thought, the frame of a call, every token that ends the turn). So a turn is
compared with what a server sends and gets. The dialogue up to the turn, rendered with `add_generation_prompt`, is the
prompt: the turn begins where it ends. The dialogue up to and with the turn, rendered, shows how a turn ends: with the
last token that follows its words there and in the whole text. Only what lies beside the nearest mark decides, since
templates rewrite what lies further back (earlier thoughts are dropped); where more differs, training and serving
differ, and that is noted.

Cost: turns with the same text beside them are looked at once. The rest is one walk over the marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from data.chat.control_tokens import one_of
from data.chat.messages import Said, last_question
from data.chat.rendered import Range, join, joined, without
from data.chat.template_check import CHANGED, EXAMPLE, agreement, differences, refusal
from data.chat.word_marks import ARGUMENTS, CONTENT, NAME, REASONING, Mark, Marked, Turn, own_marks
from data.errors import DataError

Render = Callable[..., Marked | None]  # messages -> text; `asking=True` adds the generation prompt
MOST_KNOWN = 10_000  # kinds of turns remembered

# Values of a call's arguments that get no mark: what stands beside a turn is the same with any of them.
VALUES = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\b(?:true|false|null|True|False|None)\b")

NO_END = "no token ends an answer that is not the last one: the model does not learn to stop there"
MARKED_PROMPT = "the template's generation marks put loss on the end of the prompt, which a server sends itself"
UNMARKED_ANSWER = "the template's generation marks leave a part of an answer without loss, which the model has to write"


class Unplaceable(Exception):
    """Report a turn that cannot be separated from the text around it."""


class Vocabulary(NamedTuple):
    """Hold the tokens that a template may write between words."""

    special: re.Pattern[str]  # matches any special token
    any: re.Pattern[str]  # matches special tokens first, then the other added ones

    def leading(self, text: str) -> int:
        """Measure the token that a text begins with, in characters with the white space before it; 0 if none."""
        place = len(text) - len(text.lstrip())
        found = self.special.match(text, place) or self.any.match(text, place)
        return found.end() if found else 0


class _Gap(NamedTuple):
    """Bound the search for a turn: between the marks of others, part of which may be its own."""

    anchor: Mark | None  # the last mark before the turn
    first: Mark | None  # the turn's own first mark
    last: Mark | None  # its last
    stop: int  # where the words behind it begin, or where the text ends

    @property
    def start(self) -> int:
        """Return the first place at which the turn may begin."""
        return self.anchor.at if self.anchor else 0

    @property
    def words(self) -> int:
        """Return where the turn's first words begin, or the next ones where it has none."""
        return self.first.edge if self.first else self.stop


class _Kind(NamedTuple):
    """Hold what turns of one kind have in common."""

    begin: int  # characters from the turn's beginning to its first words
    # Characters from its end to the next words, or to the end of the text; None: it ends with its words.
    end: int | None
    ended: bool
    notes: dict[str, str]  # how serving differs, each with an example

    def range_in(self, gap: _Gap) -> Range:
        """Return where a turn of this kind begins and ends."""
        begin = gap.words - self.begin
        if self.end is not None:
            return begin, gap.stop - self.end
        return begin, gap.last.edge if gap.last else begin


class TurnFinder:
    """Find turns in a template's texts; turns that look alike are examined once.

    Args:
        vocabulary: of the tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.end_of_turn: str | None = None  # where it is known
        self._known: dict[Any, _Kind] = {}

    def find(
        self, whole: Marked, said: Sequence[Said], render: Render, context: Any, strict: bool
    ) -> tuple[list[Turn], dict[str, str]]:
        """Return all assistant turns of a text, and the notes on them.

        Args:
            said: the messages that the text is made of.
            context: what a turn's looks may depend on besides the messages around it.
            strict: a prompt has to agree with the dialogue. Else, where it does not, a turn begins with its words.

        Raises:
            Unplaceable: a turn cannot be told from what is around it.
        """
        text = whole.text
        asked = last_question(said)
        shapes = [_shape(message) for message in said]
        # Without what each turn has of its own, but for its length: a kind's places are counted in characters.
        call_ids = one_of(chain.from_iterable(message.ids for message in said))
        alike = cache(lambda side: VALUES.sub(_hidden, call_ids.sub(_hidden, side)))

        turns = []
        notes: dict[str, str] = {}
        thoughts = False  # whether an earlier answer has some
        for number, gap, own_words in _gaps(whole, said):
            # Turns that have the same text and messages beside them are of one kind, which is looked at once.
            left = text[gap.anchor.edge if gap.anchor else 0 : gap.words]
            right = text[gap.last.edge : gap.stop] if gap.last else ""
            key = (
                *map(alike, (left, right)),
                *((mark.leaf.part, mark.opens) if mark else () for mark in (gap.first, gap.last)),
                *shapes[max(number - 1, 0) : number + 2],
                (number == 0, number > asked, thoughts, strict, context),
            )
            kind = self._known.get(key)
            if kind is None:
                kind = self._look(text, gap, said[: number + 1], render, strict)
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[key] = kind

            begin, end = kind.range_in(gap)
            if not gap.start <= begin <= end:
                raise Unplaceable
            turns.append(Turn(number, [(begin, end)], kind.ended, own_words))

            notes |= kind.notes
            if not kind.ended and number < len(said) - 1:
                notes[NO_END] = text[max(0, end - EXAMPLE) : end + EXAMPLE]
            thoughts = thoughts or bool(said[number].reasoning) or "</think>" in said[number].text
        return turns, notes

    def _look(self, text: str, gap: _Gap, said: Sequence[Said], render: Render, strict: bool) -> _Kind:
        """Work out the kind of a turn, which is the last of these messages."""
        before = said[:-1]
        prompt = render(before, asking=True) if before else None
        upto = render(said)

        begin = self._begin(text, gap, prompt, before, render, strict)
        end, ended = self._end(text, gap, begin, upto, prompt)
        notes = differences(text, begin, end, prompt, upto)

        at_words = gap.last is not None and not ended and end == gap.last.edge
        return _Kind(gap.words - begin, None if at_words else gap.stop - end, ended, notes)

    def _begin(
        self, text: str, gap: _Gap, prompt: Marked | None, before: Sequence[Said], render: Render, strict: bool
    ) -> int:
        """Find where the turn begins."""
        start = gap.start
        limit = gap.first.at if gap.first else gap.stop

        # As a rule the text goes on where the prompt ends.
        at = _after(prompt, gap.anchor)
        if prompt is not None and at is not None:
            asked = prompt.text[at:]
            if text.startswith(asked, start) and start + len(asked) <= limit:
                return start + len(asked)

        words = gap.first if gap.first and gap.first.leaf.part in (CONTENT, REASONING) and gap.first.opens else None
        if words and (at is None or not strict):
            return words.edge

        # The prompt may end with more than the dialogue goes on with (an opened thought), but only that may differ.
        unasked = render(before)
        between = text[start:limit]
        if prompt is None or at is None or unasked is None or not prompt.text.startswith(unasked.text):
            raise Unplaceable
        agreed = agreement(prompt.text[at:], between)
        added = prompt.text[len(unasked.text) :]
        # White space at the end of a whole text may be other than in its middle (DeepSeek-V3), unless a prompt goes on.
        if agreed < len(unasked.text if added.strip() else unasked.text.rstrip()) - at:
            raise Unplaceable

        if words:
            return words.edge
        if not gap.first and added.strip() and agreed < len(unasked.text) - at + (self._vocabulary.leading(added) or 1):
            raise refusal("an answer", len(before))  # there is nothing of what an answer begins with
        tokens = self._vocabulary.any.finditer(between)
        return start + next((token.start() for token in tokens if token.end() > agreed), agreed)

    def _end(self, text: str, gap: _Gap, begin: int, upto: Marked | None, prompt: Marked | None) -> tuple[int, bool]:
        """Find where the turn ends, and whether a token ends it."""
        last = gap.last
        place = last.edge if last else begin
        behind = text[place : gap.stop]

        # What ends a turn stands behind its words here and where the dialogue ends with it.
        rest = behind
        if upto is not None and last is not None:
            found = _last(upto, last)
            rest = behind if found is None else upto.text[found.edge :]
        elif upto is not None and prompt and upto.text.startswith(prompt.text):
            rest = upto.text[len(prompt.text) :]
        agreed = agreement(rest, behind)

        # Calls and thoughts are closed by tokens of their own, so that only special ones, or what ends any answer, end
        # a turn without words behind them.
        wordless = last is None or last.leaf.part in (NAME, ARGUMENTS, REASONING)
        if wordless and self.end_of_turn and (at := behind.rfind(self.end_of_turn, 0, agreed)) >= 0:
            return place + at + len(self.end_of_turn), True
        for pattern in (self._vocabulary.special,) if wordless else self._vocabulary:
            tokens = list(pattern.finditer(behind, 0, agreed))
            if tokens and not behind[tokens[-1].end() : agreed].strip():  # else it is part of what the model says
                return place + tokens[-1].end(), True

        # Some templates end a turn with the next role's token, or end an answer otherwise once it is not the last one.
        skipped = agreed if agreed == len(rest) else 0
        length = self._vocabulary.leading(behind[skipped:])
        if length:
            return place + skipped + length, True
        return place + len(behind[:agreed].rstrip() if last else behind[:agreed]), False


def _gaps(whole: Marked, said: Sequence[Said]) -> Iterator[tuple[int, _Gap, Range | None]]:
    """Yield the number of each assistant's message, what bounds its turn, and where its words are."""
    text, marks = whole
    own = own_marks(marks)
    before = -1  # the place of the last mark before the turn; -1 where there is none
    for number, message in enumerate(said):
        first, last = own.get(number, (None, None))
        if message.role == "assistant":
            if first is not None:
                before = first - 1
            after = (before if last is None else last) + 1
            gap = _Gap(
                anchor=marks[before] if before >= 0 else None,
                first=None if first is None else marks[first],
                last=None if last is None else marks[last],
                stop=marks[after].edge if after < len(marks) else len(text),
            )
            yield number, gap, _words(marks, first, last)
        if last is not None:
            before = last


def _hidden(value: re.Match[str]) -> str:
    return "#" * len(value.group())


def generated(
    turns: list[Turn], spans: list[tuple[int, int]], text: str, vocabulary: Vocabulary
) -> tuple[list[Turn], dict[str, str]]:
    """Build turns from the parts that the template marks as generated, and the token that ends them.

    The notes say where these marks are not what a model writes behind the prompt that a server sends.

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
    notes: dict[str, str] = {}
    for turn in turns:
        whole = turn.parts[0]
        own = parts[turn.message]

        # The token that ends the turn is trained, inside of the template's marks or right behind them.
        if own:
            begin, end = own[-1]
            closed = any(token.end() == len(text[:end].rstrip()) for token in vocabulary.any.finditer(text, begin, end))
            own[-1] = (begin, end if closed else end + vocabulary.leading(text[end:]))

        if own and own[0][0] < whole[0]:
            notes[MARKED_PROMPT] = repr(text[own[0][0] : whole[0]][-EXAMPLE:])
        if unmarked := without(whole, own):
            notes[UNMARKED_ANSWER] = repr(text[slice(*unmarked[0])][:EXAMPLE])
        done.append(turn._replace(parts=own, ended=turn.ended or not own))
    return done, notes


def trained_ranges(said: Said, turn: Turn) -> list[Range]:
    """Return the characters of a turn that are trained."""
    if not said.pieces:
        return turn.parts if said.supervised else []
    if turn.words is None:
        raise DataError(CHANGED)

    # Pieces are counted from the beginning of the message, whose white space a template strips.
    begin, end = turn.words
    origin = begin - said.text.index(said.text.strip())
    trained = joined((max(origin + a, begin), min(origin + b, end)) for a, b in join(said.pieces).loss)
    if not said.supervised:
        return trained

    untrained = without(turn.words, trained)
    return list(chain.from_iterable(without(part, untrained) for part in turn.parts))


def _shape(said: Said) -> tuple[Any, ...]:
    return said.role, bool(said.text.strip()), bool(said.reasoning), len(said.calls), said.name is None


def _after(prompt: Marked | None, anchor: Mark | None) -> int | None:
    """Find where a prompt goes on after the last mark before a turn; None if the mark is missing."""
    if prompt is None:
        return None
    if anchor is None:
        return 0
    found = _last(prompt, anchor)
    return None if found is None else found.at


def _last(marked: Marked, like: Mark) -> Mark | None:
    """Find the same mark in another text, the last one if there are several."""
    return next(
        (mark for mark in reversed(marked.marks) if (mark.number, mark.opens) == (like.number, like.opens)), None
    )


def _words(marks: Sequence[Mark], first: int | None, last: int | None) -> tuple[int, int] | None:
    """Find an answer's words; their beginning may be dropped or moved to the thoughts."""
    if first is None or last is None:
        return None
    places = [mark.at for mark in marks[first : last + 1] if mark.leaf.part == CONTENT]
    return (places[0], places[1]) if len(places) == 2 else None
