"""Marks in the words of a dialogue, by which they are found again in what a chat template writes.

There are two ways of marking. `stand_ins` puts marks in the place of all words, which shows what the template writes
around any words. `wrapped` leaves the words and puts marks around those of the assistant, for templates that look at
the words. Marks are letters and digits, so that no JSON or HTML escaping changes them; a template that changes the
words of an answer (to upper case, say) destroys them and is found out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from data.chats.messages import Call, Said

CONTENT, REASONING, NAME, ARGUMENTS, CALL_ID, TOOL = "content", "reasoning", "name", "arguments", "id", "tool"
WORDS = (CONTENT, REASONING)

# White space around a stand-in: what a template leaves of it tells what it strips from the words there. There are more
# line ends in it than templates write themselves.
BEFORE, AFTER = "\n" * 7 + "\t", "\t" + "\n" * 7
_KEPT = {BEFORE: "", "\t": "\n"}  # what is left of BEFORE, and which characters were stripped then

STAND_IN = re.compile(r"zq([ab])(\d{4})q|zqi(\d{6})")


class Leaf(NamedTuple):
    """Whose words: the number of the message, which part of it, and of which of its calls."""

    message: int
    part: str
    call: int = 0


class Place(NamedTuple):
    """Where words stand in a text: [start, end).

    Attributes:
        mark: what stands for them there, the last one where there are several.
        after: where the mark ends.
        strip: the characters stripped from the words' beginning and end; None is any white space.
        as_json: they stand there as JSON.
        opens: the words begin here; a template may have dropped their beginning.
    """

    start: int
    end: int
    leaf: Leaf
    mark: str
    after: int
    strip: tuple[str | None, str | None] = ("", "")
    as_json: bool = False
    opens: bool = True


class Unplaceable(Exception):
    """Words do not stand in the text in a way that is understood."""


class StandIns:
    """A dialogue with marks in the place of its words.

    Attributes:
        said: the marked messages.
        leaves: what each mark stands for.
    """

    def __init__(self, said: Sequence[Said]) -> None:
        self.leaves: list[Leaf] = []
        self._ids: dict[str, int] = {}
        self._id_leaves: list[Leaf] = []
        self.said = [self._mark(number, each) for number, each in enumerate(said)]

    def find(self, text: str) -> list[Place]:
        """Where the words would stand in a text that was made of the marked messages, in order.

        Raises:
            Unplaceable: something is written in a way that is not understood.
        """
        places = []
        for mark in STAND_IN.finditer(text):
            kind, number, id_number = mark.groups()
            if id_number:
                places.append(Place(*mark.span(), self._id_leaves[int(id_number)], mark.group(), mark.end()))
            elif kind == "a":
                places.append(self._place(text, mark.start(), int(number)))
        return places

    def _mark(self, number: int, said: Said) -> Said:
        leaf = self._leaf(number, CONTENT) if says(said) else None
        return said._replace(
            text=leaf or "",
            reasoning=self._leaf(number, REASONING) if said.reasoning else "",
            calls=tuple(
                Call(
                    self._id(call.id, Leaf(number, CALL_ID, place)),
                    "".join(self._pair(Leaf(number, NAME, place))),
                    dict([self._pair(Leaf(number, ARGUMENTS, place))]),
                )
                for place, call in enumerate(said.calls)
            ),
            call_id=None if said.call_id is None else self._id(said.call_id, Leaf(number, CALL_ID)),
            name=None if said.name is None else "".join(self._pair(Leaf(number, TOOL))),
            pieces=(),
        )

    def _pair(self, leaf: Leaf) -> tuple[str, str]:
        self.leaves.append(leaf)
        return _pair(len(self.leaves) - 1)

    def _leaf(self, number: int, part: str) -> str:
        return BEFORE + "".join(self._pair(Leaf(number, part))) + AFTER

    def _id(self, call_id: str, leaf: Leaf) -> str:
        """As long as Mistral's ids have to be; the id of a call and that of its result are one."""
        if call_id not in self._ids:
            self._ids[call_id] = len(self._ids)
            self._id_leaves.append(leaf)
        return f"zqi{self._ids[call_id]:06d}"

    def _place(self, text: str, start: int, number: int) -> Place:
        leaf = self.leaves[number]
        first, second = _pair(number)
        if leaf.part == ARGUMENTS:
            written, inside = json.dumps({first: second}), len('{"')
        else:
            written, inside = json.dumps(BEFORE + first + second + AFTER), len(json.dumps(BEFORE)) - 1
        if text.startswith(written, max(start - inside, 0)):
            end = start - inside + len(written)
            return Place(start - inside, end, leaf, second, text.index(second, start) + len(second), as_json=True)
        after = start + len(first + second)
        if leaf.part == ARGUMENTS or not text.startswith(first + second, start):
            raise Unplaceable
        if leaf.part not in WORDS:
            return Place(start, after, leaf, second, after)
        before = next((kept for kept in _KEPT if text.endswith(kept, 0, start)), "")
        behind = next((kept for kept in _KEPT if text.startswith(kept[::-1], after)), "")
        strip = (_KEPT.get(before), _KEPT.get(behind))
        return Place(start - len(before), after + len(behind), leaf, second, after, strip)


def _pair(number: int) -> tuple[str, str]:
    return f"zqa{number:04d}q", f"zqb{number:04d}q"


def says(said: Said) -> bool:
    """There are words, or there is nothing else: an empty answer is an answer."""
    return bool(said.text) or not (said.calls or said.reasoning)


def words_of(said: Sequence[Said], leaf: Leaf) -> Any:
    """A text, or the arguments of a call."""
    each = said[leaf.message]
    if leaf.part == CONTENT:
        return each.text
    if leaf.part == REASONING:
        return each.reasoning
    if leaf.part == TOOL:
        return each.name or ""
    if not each.calls:
        return each.call_id or ""
    call = each.calls[leaf.call]
    return {CALL_ID: call.id, NAME: call.name, ARGUMENTS: call.arguments}[leaf.part]


def structure(said: Sequence[Said]) -> tuple[Any, ...]:
    """What two dialogues have in common that have the same marked messages."""
    ids: dict[str, int] = {}
    return tuple(
        (
            each.role,
            says(each),
            bool(each.reasoning),
            tuple([ids.setdefault(call.id, len(ids)) for call in each.calls]),
            None if each.call_id is None else ids.setdefault(each.call_id, len(ids)),
            each.name is None,
        )
        for each in said
    )


class Wrapped:
    """A dialogue with marks around the assistants' words, inside of the white space that a template may strip.

    Args:
        text: what the template makes of the unmarked dialogue; the marks are none of its words.
        everybody: mark all words.

    Attributes:
        said: the marked messages.
        leaves: what each pair of marks stands around.
    """

    def __init__(self, said: Sequence[Said], text: str, everybody: bool) -> None:
        self.leaves: list[Leaf] = []
        self._around: list[tuple[str, str]] = []
        self._salt = next(salt for number in count() if (salt := f"zq{number}x") not in text)
        self._pattern = re.compile(self._salt + r"([ab])(\d+)q")
        self.said = [
            self._mark(number, each) if everybody or each.role == "assistant" else each
            for number, each in enumerate(said)
        ]

    def find(self, text: str) -> list[Place]:
        """Each mark, in order, with the white space of its words beside it."""
        places = []
        for mark in self._pattern.finditer(text):
            number = int(mark.group(2))
            lead, trail = self._around[number]
            start, end = mark.span()
            opens = mark.group(1) == "a"
            if opens:
                start -= next(len(lead) - cut for cut in range(len(lead) + 1) if text.endswith(lead[cut:], 0, start))
            else:
                end += next(cut for cut in range(len(trail), -1, -1) if text.startswith(trail[:cut], end))
            places.append(Place(start, end, self.leaves[number], mark.group(), mark.end(), opens=opens))
        return places

    def without(self, text: str) -> str:
        """The text without marks."""
        return self._pattern.sub("", text)

    def _mark(self, number: int, said: Said) -> Said:
        def wrap(words: str, part: str, call: int = 0) -> str:
            core = words.strip()
            begin = words.index(core) if core else len(words)
            end = begin + len(core)
            self.leaves.append(Leaf(number, part, call))
            self._around.append((words[:begin], words[end:]))
            mark = f"{len(self.leaves) - 1}q"
            return f"{words[:begin]}{self._salt}a{mark}{core}{self._salt}b{mark}{words[end:]}"

        def wrap_all(value: Any, call: int) -> Any:
            if isinstance(value, str):
                return wrap(value, ARGUMENTS, call)
            if isinstance(value, list):
                return [wrap_all(each, call) for each in value]
            if isinstance(value, dict):
                return {key: wrap_all(each, call) for key, each in value.items()}
            return value

        calls = [
            Call(call.id, wrap(call.name, NAME, place), wrap_all(call.arguments, place))
            for place, call in enumerate(said.calls)
        ]
        return said._replace(
            text=wrap(said.text, CONTENT) if says(said) else "",
            reasoning=wrap(said.reasoning, REASONING) if said.reasoning else "",
            calls=tuple(calls),
        )
