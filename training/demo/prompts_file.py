"""Answer the prompts of a file, several at once, into another file.

A line in is an object with a `prompt` and maybe an `input` as in records of instruct, or with `messages` and maybe
`tools` as in records of type chat; whatever else it holds is kept. A line out is the same with its `answer`. Lines come
out in the order of the prompts, each as soon as those before it are there. A start that was ended goes on behind the
last whole line.

All prompts are looked at before the first is answered.
"""

from __future__ import annotations

import codecs
import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError, model_validator
from pydantic_core import from_json

from data.chat.messages import JSON, Said, said_in
from data.errors import DataError
from data.records.chat import Chat
from data.records.record import explain, json_type
from models.generation import Request, generate_many
from training.demo.speaker import Answer, Speaker, Wishes

ANSWER = "answer"
MOST_SEEDS = 2**63


class Dialogue(Chat):
    """A dialogue that waits for an answer."""

    @model_validator(mode="after")
    def _check(self) -> Dialogue:
        if self.messages[-1].role in ("assistant", "system"):
            raise ValueError("messages: expected a question or a result at the end")
        return self


def answer_all(
    speaker: Speaker,
    wishes: Wishes,
    source: Path,
    target: Path,
    opening: Sequence[Said],
    rows: int | None,
    tell: Callable[[str], None],
    raw: bool = False,
) -> None:
    """Answer the prompts of `source` that `target` has no answers to yet.

    Args:
        opening: what stands before every prompt.
        rows: how many are answered at once; see `generate_many`.
        raw: each prompt is a text to go on with, as in records of pretrain.

    Raises:
        DataError: a line is wrong or too long for the model, or `target` answers other prompts.
    """
    lines, seed = _lines(source), wishes.sampling.seed

    def request(place: int, number: int, line: JSON) -> Request:
        try:
            said, tools = _said(line, opening, raw)
            prompt = speaker.encode_beginning(said[0].text) if raw else speaker.encode(said, tools)
            return speaker.request(prompt, wishes, None if seed is None else (seed + place) % MOST_SEEDS)
        except DataError as error:
            raise DataError(f"{source}: line {number}: {error}") from None

    with _writing(target) as file:
        kept = _answered(file, target, source, [line for _, line in lines])
        if kept:
            tell(f"{target}: {kept} of {len(lines)} answers are there already and stay as they are")
        asked = [request(place, *lines[place]) for place in range(kept, len(lines))]
        for (_, line), answer in zip(lines[kept:], _in_order(speaker, wishes, asked, rows, raw), strict=True):
            file.write(json.dumps(line | {ANSWER: answer}, ensure_ascii=False).encode() + b"\n")
            file.flush()
    tell(f"{target}: {len(lines)} answers")


def _said(line: JSON, opening: Sequence[Said], raw: bool) -> tuple[list[Said], list[JSON] | None]:
    """Read the messages and tools of a line.

    Raises:
        DataError: a field is wrong.
    """
    if ANSWER in line:
        raise DataError(f"field {ANSWER}: expected it absent, as the answer is written there")
    if ("prompt" in line) == ("messages" in line):
        raise DataError("expected either prompt or messages")
    messages = line["messages"] if "messages" in line else [{"role": "user", "content": line["prompt"]}]
    try:
        dialogue = Dialogue.model_validate({"messages": messages, "tools": line.get("tools")})
    except ValidationError as error:
        raise DataError(explain(error).replace("messages[0].content", "prompt")) from None
    beside = next((name for name in ("messages", "tools", "input") if line.get(name) is not None), None)
    if raw and beside:
        raise DataError(f"field {beside}: expected a prompt alone, as --raw goes on with its text")
    about, said = line.get("input"), said_in(dialogue)
    if about is not None and "prompt" not in line:
        raise DataError("field input: expected it beside a prompt")
    if about is not None and not isinstance(about, str):
        raise DataError(f"field input: expected a string, found {json_type(about)}")
    if {each.role for each in said} & {each.role for each in opening}:
        raise DataError("field messages: has a system message; expected none beside --system")
    return [*opening, *said[:-1], said[-1]._replace(input=about or "")], dialogue.tools


def _in_order(speaker: Speaker, wishes: Wishes, asked: list[Request], rows: int | None, raw: bool) -> Iterator[str]:
    """Yield the answers in the order of the requests."""
    answers = {request: Answer(speaker.tokenizer, wishes.stop, goes_on=raw) for request in asked}
    following = 0
    for request, token in generate_many(speaker.model, asked, rows):
        if token is not None:
            answers[request].add(token)
            request.done = request.done or answers[request].stopped is not None
        while following < len(asked) and asked[following].done:
            yield answers.pop(asked[following]).text
            following += 1


def _lines(source: Path) -> list[tuple[int, JSON]]:
    """Read the objects of a file of lines, with their numbers."""
    found = []
    try:
        content = source.read_bytes().removeprefix(codecs.BOM_UTF8)
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                found.append((number, _object(line, f"{source}: line {number}")))
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror}; expected a file of prompts") from None
    if not found:
        raise DataError(f"{source}: expected at least one prompt, found none")
    return found


def _object(line: bytes, where: str) -> JSON:
    try:
        value: Any = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise DataError(f"{where}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object with a prompt or messages, found {json_type(value)}")
    return value


@contextmanager
def _writing(target: Path) -> Iterator[BinaryIO]:
    """Open the file for this process alone."""
    try:
        with target.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
    except BlockingIOError:
        raise DataError(f"{target}: another process writes it; expected another --output") from None
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror}") from None


def _answered(file: BinaryIO, target: Path, source: Path, lines: list[JSON]) -> int:
    """Count the whole answers; cut off the beginning of another one."""
    file.seek(0)
    written = file.read()
    whole = written[: written.rfind(b"\n") + 1]
    done = [_object(line, f"{target}: line {number}") for number, line in enumerate(whole.splitlines(), start=1)]
    nothing: JSON = {}
    for number, (line, asked) in enumerate(zip_longest(done, lines[: len(done)], fillvalue=nothing), start=1):
        if not isinstance(line.get(ANSWER), str) or line != asked | {ANSWER: line[ANSWER]}:
            raise DataError(f"{target}: line {number} answers no prompt of {source}; expected another --output")
    file.truncate(len(whole))
    return len(done)
