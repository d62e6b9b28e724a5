"""Check that the rendered text matches the record and what a server sends.

Templates leave out words beside a call, thoughts, results, arguments, or change the words. Such a record is refused
with what is missing. Only the thoughts of answers before the last question may be left out, as many templates do on
purpose, in training and on a server; that is noted.

A server sends the dialogue up to an answer, rendered with `add_generation_prompt`, and the model writes what the
template has behind it, until a token ends the turn. Where the training text has something else before the answer, or
another answer, the model is asked in a way that it was not trained for; a person should see both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from data.chat.messages import JSON, Call, Said, last_question
from data.chat.word_marks import ARGUMENTS, CONTENT, NAME, REASONING, Leaf, Mark, Marked, Turn, own_marks
from data.errors import DataError
from data.images.marks import words_in

CHANGED = "the chat template changes the words of an answer; use prompt_format: plain"
RESULTS_WITHIN = (
    "the chat template writes the result of a call into the middle of the answer that calls (message {number}), so that"
    " the rest of it stands behind the result; expected calls without words, one at a time, weight: 0 there, or a "
    "template that writes results behind the answer (prompt_format: a Jinja file)"
)
LEFT_OUT = "the chat template leaves out {what}; expected one that writes it (prompt_format: a Jinja file)"
NO_THOUGHTS = "the chat template leaves out the thoughts before the last question; mask: last_turn trains none of these"
OTHER_PROMPT = "what a server sends before an answer differs from what is trained before it"
OTHER_ANSWER = "what a server expects as an answer differs from what is trained as one"
TAG = re.compile(r"<[^<>]*>")
LONGEST_THOUGHT = 200  # characters
LONGEST_NAME = 60
EXAMPLE = 120  # characters of each text that differs


def check_survival(
    said: Sequence[Said], tools: list[JSON], whole: Marked, leaves: Sequence[Leaf], turns: Sequence[Turn]
) -> dict[str, str]:
    """Check that all words are in the text; note thoughts left out on purpose.

    Args:
        whole: what the template writes.
        leaves: of the pairs of marks in it.

    Raises:
        DataError: something is not there.
    """
    begins = {mark.number: mark.at for mark in whole.marks if mark.opens}
    ends = {mark.number: mark.at for mark in whole.marks if not mark.opens}
    turn_of = {turn.message: turn for turn in turns}
    asked = last_question(said)

    thoughts: list[str] = []  # that are left out
    for number, leaf in enumerate(leaves):
        message = said[leaf.message]
        if number not in ends:
            if leaf.part == NAME and named_by_id(message.calls[leaf.call], whole.text):
                continue
            if leaf.part != REASONING or leaf.message > asked:
                _refuse_leaf(leaf, message)
            if leaf.part == REASONING:
                thoughts.append(message.reasoning)
        elif leaf.part == CONTENT and message.role == "assistant":
            # The beginning of an answer's words may be dropped, or moved to its thoughts, mark and all.
            begin = begins.get(number, turn_of[leaf.message].parts[0][0])
            if not _whole(whole.text[begin : ends[number]], message.text.strip(), number in begins):
                if leaf.message > asked:
                    raise refusal("the thoughts in the words of an answer", leaf.message)
                thoughts.append(message.text)

    _check_unmarked(said, tools, whole.text, {leaf.message for leaf in leaves}, turn_of)
    return {NO_THOUGHTS: thoughts[0][:LONGEST_THOUGHT]} if thoughts else {}


def check_order(marks: Sequence[Mark], said: Sequence[Said]) -> None:
    """Check that nobody else's words stand inside a trained answer.

    Raises:
        DataError: they do, as where the words beside a call follow its result.
    """
    for number, (first, last) in own_marks(marks).items():
        trained = said[number].supervised or said[number].pieces
        if trained and any(mark.leaf.message != number for mark in marks[first:last]):
            raise DataError(RESULTS_WITHIN.format(number=number + 1))


def named_by_id(call: Call, text: str) -> bool:
    """Test for a call's id that holds its name, which some templates write alone (`functions.f:0`)."""
    return call.name in call.id and call.id in text


def _refuse_leaf(leaf: Leaf, said: Said) -> None:
    if leaf.part == REASONING:
        raise refusal("the thoughts of an answer", leaf.message)
    if leaf.part == CONTENT:
        raise refusal("the words beside a call" if said.calls else f"what the {said.role} says", leaf.message)
    if leaf.part in (NAME, ARGUMENTS):
        raise refusal(f"a call of {said.calls[leaf.call].name[:LONGEST_NAME]}", leaf.message)


def _whole(written: str, core: str, begun: bool) -> bool:
    """Test whether all of an answer's words are there, even with its thoughts elsewhere.

    Raises:
        DataError: they are others.
    """
    if written in (core, _escaped(core)):
        return True
    if begun or not _parts(written) <= _parts(core):
        raise DataError(CHANGED)
    return _parts(core) <= _parts(written)


def _check_unmarked(
    said: Sequence[Said], tools: list[JSON], text: str, marked: set[int], turns: dict[int, Turn]
) -> None:
    """Check what has no marks: tools, non-text arguments, messages that marks would change."""
    for tool in tools:
        function = tool.get("function", tool)
        name = str(function.get("name", "")) if isinstance(function, dict) else ""
        if not _is_in(name, text):
            raise DataError(LEFT_OUT.format(what=f"the tool {name[:LONGEST_NAME]}"))

    place = 0
    for number, message in enumerate(said):
        unmarked = words_in(message.text) if number not in marked else []
        for core in filter(None, map(str.strip, unmarked)):
            # Most stand in their order; one that does not is looked for everywhere.
            found = max(text.find(core, place), text.find(_escaped(core), place))
            if found < 0 and not _is_in(core, text):
                raise refusal(f"what the {message.role} says", number)
            place = max(place, found)
        if message.calls:
            begin, end = turns[number].parts[0]
            for call in message.calls:
                numbers = [str(value) for value in call.arguments.values() if type(value) in (int, float)]
                if not all(_is_in(value, text[begin:end]) for value in (*call.arguments, *numbers)):
                    raise refusal(f"arguments of a call of {call.name[:LONGEST_NAME]}", number)


def _is_in(words: str, text: str) -> bool:
    return words in text or _escaped(words) in text


def _escaped(words: str) -> str:
    return json.dumps(words, ensure_ascii=False)[1:-1]


def _parts(words: str) -> set[str]:
    """Return the text between tags."""
    return {part.strip() for part in TAG.split(words) if part.strip()}


def refusal(what: str, message: int) -> DataError:
    """Make the error for a message (from 0) of which the template drops something."""
    return DataError(LEFT_OUT.format(what=f"{what} (message {message + 1})"))


def agreement(one: str, other: str) -> int:
    """Count the characters of the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


def differences(text: str, begin: int, end: int, prompt: Marked | None, upto: Marked | None) -> dict[str, str]:
    """Describe how a turn differs from what a server sends and expects."""
    if prompt is None or upto is None:
        return {}
    if text[:begin] != prompt.text:
        return {OTHER_PROMPT: _differing(prompt.text, text[:begin])}
    answer = upto.text[len(prompt.text) :]
    # A turn may be ended by the next role's token, which stands in no answer.
    if not upto.text.startswith(prompt.text) or not text[begin:end].startswith(answer.rstrip()):
        return {OTHER_ANSWER: _differing(answer, text[begin:end])}
    return {}


def _differing(served: str, trained: str) -> str:
    """Show two texts side by side, from just before they differ."""
    begin = max(0, agreement(served, trained) - EXAMPLE // 3)
    both = [repr(each[begin : begin + EXAMPLE]) for each in (served, trained)]
    return f"served {both[0]}, trained {both[1]}"
