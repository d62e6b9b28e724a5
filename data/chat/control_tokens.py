"""Find names of control tokens in a record's words.

A tokenizer reads `<|im_end|>` in a question as the control token, in training as on a server, and a model that is
trained on such a text learns to stop in the middle of it. The text may be meant so (a dataset that holds prompts ready
made) or be rubbish (`</s>` left at the end of each answer); which, only a person can say. So such records are trained
as they are, and counted.

Cost: a search of a record's bytes for a few beginnings of names, a microsecond for each thousand characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.chat.messages import said_in
from data.records.chat import Chat
from data.records.record import Pretrain, Record, Segments, Tokenized

BEGINNING = 2  # characters of a name that are looked for first
ESCAPE = b"\\u"  # JSON may write any character so


class ControlWords:
    """Look for a tokenizer's control tokens in records."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._beginnings = {name[:BEGINNING] for name in names}
        self._hints = [*(beginning.encode() for beginning in self._beginnings), ESCAPE]
        self._names = one_of(names)

    def possible(self, raw: Any) -> bool:
        """Test a record's JSON quickly: nearly all records hold none and are ruled out here."""
        return not isinstance(raw, bytes) or any(map(raw.__contains__, self._hints))

    def found(self, record: Record) -> list[str]:
        """Return the names in a record's words, in order; mostly none."""
        names: list[str] = []
        for words in words_of(record):
            if any(beginning in words for beginning in self._beginnings):
                names += self._names.findall(words)
        return names


def one_of(words: Iterable[str]) -> re.Pattern[str]:
    """Make a pattern of any of the words, longest first; without words it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


def words_of(record: Record) -> Iterator[str]:
    """Return a record's words, without ready-made text."""
    if isinstance(record, Pretrain):
        yield record.text
    if isinstance(record, (Pretrain, Segments, Tokenized)):  # ready made, control tokens and all
        return
    for each in said_in(record):
        yield each.text
        yield each.input or ""
        yield each.reasoning
        for call in each.calls:
            yield json.dumps(call.arguments, ensure_ascii=False)
    if isinstance(record, Chat) and record.tools:
        yield json.dumps(record.tools, ensure_ascii=False)
