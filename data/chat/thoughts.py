"""Thoughts and words in what a model writes, told apart.

A chat template puts both into a frame of its own, which a model that was trained by it writes too. The frame is learnt
from what the template writes for words and a thought that are known; white space may differ.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from data.chat.calls import loose
from data.chat.messages import Said

KNOWN = Said("assistant", "So.", reasoning="Hm.")


class AnswerForm(NamedTuple):
    """How a template writes an answer: the text behind the prompt, with the groups `words` and maybe `thought`."""

    pattern: re.Pattern[str]

    def read(self, text: str) -> tuple[str, str]:
        """The thought and the words of an answer; all of it is words where it has another form."""
        found = self.pattern.fullmatch(text)
        return (found.groupdict().get("thought") or "", found["words"]) if found else ("", text)


def learn_answer(bare: str, thinking: str) -> AnswerForm:
    """The form of a template that writes the words of `KNOWN`, and its thought and words, like this."""
    openings = [loose(bare.partition(KNOWN.text)[0].lstrip()), ""]
    opening, _, rest = thinking.partition(KNOWN.reasoning)
    between, ended, _ = rest.partition(KNOWN.text)
    if ended and between.strip():  # else the template takes no thoughts, or nothing tells where one ends
        cut = r"|\Z" if opening.strip() else ""  # an opened thought may go on to the end of the text
        openings.insert(0, f"{loose(opening.lstrip())}(?P<thought>.*?)(?:{loose(between)}{cut})")
    return AnswerForm(re.compile(f"(?:{'|'.join(openings)})(?P<words>.*)", re.DOTALL))
