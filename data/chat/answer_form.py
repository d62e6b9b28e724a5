"""Parse a model's answer in its trained form: thoughts, words and tool calls.

A chat template that takes tools or thoughts puts them into a form of its own, which is learnt from what it writes for
calls and answers that are known; white space may differ.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from data.chat.messages import JSON, Call, Said, call_id_of

KNOWN_CALLS = Call(call_id_of(1), "look", {"up": "it"}), Call(call_id_of(2), "find", {"in": "there"})
KNOWN_ANSWER = Said("assistant", "So.", reasoning="Hm.")
_NAME = r"(?P<name>[^\s\"]+?)"
_ARGUMENTS_NEXT = r'(?=[{"])'
_DECODER = json.JSONDecoder()


class CallForm(NamedTuple):
    """Describe how a template writes calls.

    Attributes:
        opening: stands before the first name.
        first: the first call up to its arguments.
        next: what follows the arguments, up to those of the next call; None where there is one call at most.
    """

    opening: re.Pattern[str]
    first: re.Pattern[str]
    next: re.Pattern[str] | None

    def read(self, text: str, number: int) -> tuple[str, tuple[Call, ...]]:
        """Return the words before the calls, and the calls.

        Args:
            number: of the first call, which its id tells.

        Raises:
            ValueError: a call begins that cannot be read.
        """
        begin = self.opening.search(text)
        if begin is None:
            return text, ()
        calls: list[Call] = []
        found = self.first.match(text, begin.start())
        if found is None:
            raise ValueError("no name with arguments follows")
        while found:
            arguments, end = _object_at(text, found.end())
            calls.append(Call(call_id_of(number + len(calls)), found["name"], arguments))
            found = self.next.match(text, end) if self.next else None
        return text[: begin.start()].rstrip(), tuple(calls)


def learn_calls(one: str, two: str | None) -> CallForm | None:
    """Learn the form of a template from the first of `KNOWN_CALLS`, and from both; None if it cannot be read back.

    Args:
        two: None where the template does not take two calls at once.
    """
    found = _find(one, KNOWN_CALLS[0])
    if found is None or not one[: found[0]].strip():
        return None
    name, arguments, _ = found
    between = one[name + len(KNOWN_CALLS[0].name) : arguments]
    opening, rest = loose(one[:name]), _NAME + loose(between) + _ARGUMENTS_NEXT
    following = None
    if two and (first := _find(two, KNOWN_CALLS[0])) and (second := _find(two, KNOWN_CALLS[1])):
        following = re.compile(loose(two[first[2] : second[0]]) + rest)
    return CallForm(re.compile(opening), re.compile(opening + rest), following)


def _find(text: str, call: Call) -> tuple[int, int, int] | None:
    """Find where a call's name begins, and where its arguments begin and end."""
    name = text.find(call.name)
    for place in range(name, len(text) if name >= 0 else name):
        try:
            arguments, end = _object_at(text, place)
        except ValueError:
            continue
        if arguments == call.arguments:
            return name, place, end
    return None


def _object_at(text: str, place: int) -> tuple[JSON, int]:
    """Parse the JSON object at a place (maybe inside a JSON string) and return where it ends."""
    try:
        value: Any
        value, end = _DECODER.raw_decode(text, place)
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("its arguments are no JSON object")
    return value, end


def loose(text: str) -> str:
    """Make a pattern of a text that ignores white space and call ids."""
    pattern = r"\s*".join(re.escape(piece) for piece in re.split(r"\s+", text))
    for call in KNOWN_CALLS:
        pattern = pattern.replace(call.id, r"[^\s\"]*")
    return pattern


class AnswerForm(NamedTuple):
    """Describe how a template writes an answer: a pattern with groups `words` and maybe `thought`."""

    pattern: re.Pattern[str]

    def read(self, text: str) -> tuple[str, str]:
        """Split an answer into thought and words; all is words if the form differs."""
        found = self.pattern.fullmatch(text)
        return (found.groupdict().get("thought") or "", found["words"]) if found else ("", text)


def learn_answer(bare: str, thinking: str) -> AnswerForm:
    """Learn the form of an answer from `KNOWN_ANSWER` written with and without its thought."""
    openings = [loose(bare.partition(KNOWN_ANSWER.text)[0].lstrip()), ""]
    opening, _, rest = thinking.partition(KNOWN_ANSWER.reasoning)
    between, ended, _ = rest.partition(KNOWN_ANSWER.text)
    if ended and between.strip():  # else the template takes no thoughts, or nothing tells where one ends
        cut = r"|\Z" if opening.strip() else ""  # an opened thought may go on to the end of the text
        openings.insert(0, f"{loose(opening.lstrip())}(?P<thought>.*?)(?:{loose(between)}{cut})")
    return AnswerForm(re.compile(f"(?:{'|'.join(openings)})(?P<words>.*)", re.DOTALL))
