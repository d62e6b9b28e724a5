"""What a model is asked before and after: the shipped questions, or a sample of the user's own records.

A question is a line of a file of prompts for demo.py. Of a dialogue it is all that stands before the first answer that
is trained; of a text to go on with, what stands before its middle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain, islice
from pathlib import Path
from typing import Any

from data.chat.messages import as_record, said_in
from data.errors import DataError
from data.records.chat import Chat
from data.records.raw_records import read_file
from data.records.reading import parse
from data.records.record import Conversation, Instruct, Pretrain, Record
from data.records.sources import files_of
from data.settings import Source
from quickstart.judge import Judge

SHIPPED = Path(__file__).with_name("questions.json")
ASKED = 8  # of the user's own records
LOOKED_AT = 2000  # records, from which they are taken
COMPARED = 200  # characters of an answer
OF_A_TEXT, LONGEST = 1000, 4000  # characters of a question: what a text goes on from, and as long as there are others


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        line: of a file of prompts.
        shown: what a person sees of it.
        answer: the record's own.
        trained: whether a record asks it in these words.
        raw: whether it is a text to go on with.
        judge: of the shipped questions' answers.
    """

    line: dict[str, Any]
    shown: str
    answer: str = ""
    trained: bool = True
    raw: bool = False
    judge: Judge | None = None

    def fault(self, answer: str) -> str:
        """Say what is wrong with an answer to a shipped question; nothing if it is right."""
        assert self.judge
        return self.judge.fault(answer)

    def likeness(self, answer: str) -> float:
        """Compare the first 200 characters of an answer with the record's own: 0 to 1."""
        return SequenceMatcher(None, self.answer[:COMPARED], answer[:COMPARED], autojunk=False).ratio()


def shipped(records: Path) -> list[Question]:
    """Read the questions of questions.json; the records tell which of them are trained in the same words."""
    known = json.loads(records.read_text(encoding="utf-8"))
    asked = set(chain.from_iterable(map(_asked_in, known)))
    texts = [json.dumps(raw, ensure_ascii=False) for raw in known]
    questions = []
    for each in json.loads(SHIPPED.read_text(encoding="utf-8")):
        ask = each["ask"]
        judge = Judge(texts, ask, each["require"], each["forbid"])
        questions.append(Question({"prompt": ask}, ask, trained=ask in asked, judge=judge))
    return questions


def sample_of(data: str, skip_bad: bool = False) -> list[Question]:
    """Choose questions from the user's own records, evenly spread over the first ones.

    Args:
        skip_bad: pass over bad records, as the run does with `on_bad_record: skip`.

    Raises:
        DataError: the records cannot be read, or none of the first ones can be asked.
    """
    found = [question for record in islice(_records_in(data, skip_bad), LOOKED_AT) if (question := question_of(record))]
    if not found:
        raise DataError(
            f"{data}: none of the first {LOOKED_AT} records can be asked alone; expected some of instruct, "
            "conversation, chat or pretrain"
        )
    found = [each for each in found if len(json.dumps(each.line, ensure_ascii=False)) <= LONGEST] or found
    step = max(1, len(found) // ASKED)
    return found[::step][:ASKED]


def question_of(record: Record) -> Question | None:
    """Return the first question of a record; None where a prompts file of demo.py cannot hold its context."""
    if isinstance(record, Pretrain):
        half = len(record.text) // 2
        prompt, rest = record.text[max(0, half - OF_A_TEXT) : half], record.text[half:]
        return Question({"prompt": prompt}, prompt, rest, raw=True) if half else None
    if isinstance(record, Instruct):
        about = record.input or ""  # an empty one says that it is an instruction
        return Question(
            {"prompt": record.instruct, "input": about}, f"{record.instruct} {about}".strip(), record.output
        )
    if not isinstance(record, (Chat, Conversation)):
        return None
    said = said_in(record)
    place = next(number for number, each in enumerate(said) if each.supervised or each.pieces)
    if not place or said[place - 1].role != "user":
        return None
    answer = said[place]
    called = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in answer.calls]
    tools = {"tools": record.tools} if isinstance(record, Chat) and record.tools else {}
    line = {"messages": as_record(said[:place])} | tools
    return Question(line, said[place - 1].text, "\n".join([answer.text, *called]).strip())


def _records_in(data: str, skip_bad: bool) -> Iterator[Record]:
    for file in files_of(Source(path=data)):
        for raw in read_file(file):
            try:
                yield from parse(raw).records
            except DataError as error:
                if skip_bad:
                    continue
                raise DataError(f"{file}: record {raw.number}: {error}") from None


def _asked_in(raw: dict[str, Any]) -> Iterator[str]:
    if "instruct" in raw:
        yield raw["instruct"]
    yield from (text for role, text in raw.get("rounds", []) if role == "ask")
