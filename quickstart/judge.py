"""Judge whether a reader would call an answer of the shipped run right.

A model this small says what its records say, or makes things up. So an answer is right if it has what the question asks
for, and nothing that the records on the subject do not have: no other word, no Chinese character or number of its own,
no command that they do not give, nothing twice. That may count a right answer in new words as wrong, never the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

WORD = re.compile(r"[a-z_]+|\d+|[^\x00-\x7f]")
IN_A_COMMAND = re.compile(r"[^\s`,;:()，。；：、（）]+")
COMMON = set(
    "a an and are as at be by can each for from has in is it its of on one or that the this to use with".split()
)
TWICE = 6  # words in a row; a Chinese character counts as one


class Judge:
    """Knows one question's right answers.

    Args:
        records: the texts that the model was trained on; those with all `required` words are on the subject.
        required: what the answer must have.
        forbidden: regular expressions of what makes it wrong, though every word of it is in the records.
    """

    def __init__(
        self, records: Sequence[str], ask: str, required: Sequence[str], forbidden: Sequence[str] = ()
    ) -> None:
        self.required, self._forbidden = required, forbidden
        about = [text for text in records if all(each in text for each in required)]
        self._known = COMMON.union(words(ask), *map(words, about))
        self._commands = set(chain.from_iterable(map(commands, records)))

    def fault(self, answer: str) -> str:
        """Say what is wrong with an answer; nothing if it is right."""
        said = words(answer)
        runs = [tuple(said[begin : begin + TWICE]) for begin in range(len(said) - TWICE + 1)]
        faults = {
            "lacks": next((each for each in self.required if each not in answer), ""),
            "wrong": next((found[0] for each in self._forbidden if (found := re.search(each, answer))), ""),
            "no command": next((" ".join(each) for each in commands(answer) if each not in self._commands), ""),
            "not in the records on this": next((each for each in said if each not in self._known), ""),
            "twice": next((" ".join(each) for number, each in enumerate(runs) if each in runs[:number]), ""),
        }
        return next((f"{kind}: {what}" for kind, what in faults.items() if what), "")


def words(text: str) -> list[str]:
    """Split a text into words, numbers and Chinese characters, without ASCII punctuation and the numbers of options."""
    return WORD.findall(re.sub(r"(--\S+) \d+", r"\1", text.lower()))


def commands(text: str) -> list[tuple[str, str]]:
    """Find what stands beside each other in a command: an option, its value, a script, and what is before them."""
    found: Iterable[str] = (each.rstrip(".") for each in IN_A_COMMAND.findall(re.sub(r"\d+", "0", text)))
    return [pair for pair in pairwise(found) if any(each.startswith("--") for each in pair) or ".py" in pair[1]]
