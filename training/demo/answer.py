"""An answer as text while its tokens come.

What may still become part of a character, or of a text that ends the answer, is held back until it is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # the end of a text that stops in the middle of a character of several tokens
BEFORE = "a"  # some decoders drop a blank at the beginning, so that something has to stand before it


class Answer:
    """The text of one answer.

    Args:
        stop: texts of which the first that is whole ends it; it is no part of it.
        goes_on: it goes on with a text, and the white space that it begins with is part of it.

    Attributes:
        raw: the text, with the white space that it begins with.
        stopped: the text that ended it, if one did.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], goes_on: bool = False) -> None:
        self.raw = ""
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = stop
        self._opening: list[int] = tokenizer(BEFORE, add_special_tokens=False)["input_ids"] if goes_on else []
        self._before = ""  # what the tokens go on with
        self._tokens: list[int] = []
        self._shown = 0

    @property
    def text(self) -> str:
        """Without the white space; ChatGLM3 begins on a new line, which its prompt writes too."""
        return self.raw if self._opening else self.raw.lstrip()

    def add(self, token: int) -> str:
        """Take a token; gives the piece of text that is certain now."""
        self._tokens.append(token)
        written = self._tokenizer.decode(self._opening + self._tokens)[len(BEFORE) if self._opening else 0 :]
        known = self._before + written.rstrip(INCOMPLETE)
        if len(known) <= len(self.raw):  # some decoders take back what stands before half a character
            return ""
        self.raw = known
        found = ((self.raw.find(each, len(self._before)), each) for each in self._stop)
        # The one that is whole first, as if each character were a token: that cannot depend on where tokens end.
        whole = [(place + len(each), place, each) for place, each in found if place >= 0]
        if whole:
            _, place, self.stopped = min(whole)
            self.raw = self.raw[:place]
        return self._piece(0 if whole else self._uncertain())

    def end(self) -> str:
        """The piece that was held back."""
        return self._piece(0)

    def insert(self, text: str) -> None:
        """Go on behind a text that the model did not write."""
        self.raw += text
        self._before, self._tokens, self.stopped = self.raw, [], None
        self._shown = len(self.text)

    def _uncertain(self) -> int:
        """Characters at the end that a stop text may begin with."""
        lengths = (length for each in self._stop for length in range(1, len(each)) if self.raw.endswith(each[:length]))
        return max(lengths, default=0)

    def _piece(self, held_back: int) -> str:
        text = self.text
        begin, self._shown = self._shown, max(self._shown, len(text) - held_back)
        return text[begin : self._shown]
