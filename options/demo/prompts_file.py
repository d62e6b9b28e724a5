"""Answer a file of prompts, several at once, into another file.

An input line is an object with a `prompt` and maybe an `input`, as in records of type instruct, or with `messages` and
maybe `tools`, as in records of type chat; images stand in it as in records, and other fields are kept. An output line
is the input with its `answer`. Answers are written in the order of the prompts, each as soon as all before it are
complete. A second start continues after the last complete line.

All prompts are checked before the first one is answered.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError, model_validator
from pydantic_core import from_json

from common.lease import lock
from data.chat.messages import JSON, Said, said_in
from data.errors import DataError
from data.images.image import Image
from data.images.in_records import NAMES, Look, take_images
from data.records.chat import Chat
from data.records.record import explain, json_type
from options.demo.chat_model import Answer, AnswerOptions, ChatModel
from options.demo.generation import Request
from options.demo.pictures import shown

ANSWER = "answer"
FIELDS = ("prompt", "messages", "tools", "input")
MOST_SEEDS = 2**63


class Prompt(Chat):
    """A line of the file: messages that wait for an answer; a `prompt` stands for one message."""

    input: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_messages(cls, line: JSON) -> JSON:
        if "messages" in line:
            if line.get("input") is not None:
                raise ValueError("input: expected it beside a prompt")
            return line
        return line | {"messages": [{"role": "user", "content": line["prompt"]}]}

    @model_validator(mode="after")
    def _check(self) -> Prompt:
        if self.messages[-1].role in ("assistant", "system"):
            raise ValueError("messages: expected a question or a result at the end")
        return self


def answer_file(
    model: ChatModel,
    options: AnswerOptions,
    source: Path,
    target: Path,
    opening: Sequence[Said],
    rows: int | None,
    notify: Callable[[str], None],
    raw: bool = False,
) -> None:
    """Answer the prompts of `source` that have no answer in `target` yet.

    Args:
        opening: messages before every prompt.
        rows: how many are answered at once; see `ChatModel.generate`.
        raw: each prompt is a text to continue, as in records of type pretrain.

    Raises:
        DataError: a line is wrong or too long for the model, or `target` has answers to other prompts.
    """
    lines, seed = read_prompts(source), options.sampling.seed
    look = model.pictures.looking_from(source.parent) if model.pictures else None

    def request(place: int, number: int, line: JSON) -> Request:
        try:
            beside = [name for name in (*FIELDS[1:], *NAMES) if line.get(name) is not None]
            if raw and beside:
                raise DataError(f"field {beside[0]}: expected a prompt alone, as --raw continues its text")
            marked, images = _take_images(line, look)
            said, tools = _messages(marked, opening)
            prompt = model.encode_beginning(said[0].text) if raw else model.encode(said, tools, images)
            own_seed = None if seed is None else (seed + place) % MOST_SEEDS
            return model.request(prompt, options, own_seed, shown(said, images))
        except DataError as error:
            raise DataError(f"{source}: line {number}: {error}") from None

    with _locked(target) as file:
        kept = _count_answered(file, target, source, [line for _, line in lines])
        if kept:
            notify(f"{target}: {kept} of {len(lines)} answers are there already and stay as they are")
        requests = [request(place, *lines[place]) for place in range(kept, len(lines))]
        for (_, line), answer in zip(lines[kept:], _answers(model, options, requests, rows, raw), strict=True):
            file.write(json.dumps(line | {ANSWER: answer}, ensure_ascii=False).encode() + b"\n")
            file.flush()
    notify(f"{target}: {len(lines)} answers")


def _take_images(line: JSON, look: Look | None) -> tuple[JSON, tuple[Image, ...]]:
    """Return the fields of a line that are asked with, with marks for its images, and these."""
    try:
        return take_images({name: line[name] for name in (*FIELDS, *NAMES, ANSWER) if name in line}, look)
    except ValueError as error:
        raise DataError(str(error)) from None


def _messages(line: JSON, opening: Sequence[Said]) -> tuple[list[Said], list[JSON]]:
    """Return the messages and tools of a line."""
    if ANSWER in line:
        raise DataError(f"field {ANSWER}: expected it absent, as the answer is written there")
    if ("prompt" in line) == ("messages" in line):
        raise DataError("expected either prompt or messages")
    try:
        prompt = Prompt.model_validate({name: line[name] for name in FIELDS if name in line})
    except ValidationError as error:
        raise DataError(explain(error).replace("messages[0].content", "prompt")) from None
    said = said_in(prompt)
    if {each.role for each in said} & {each.role for each in opening}:
        raise DataError("field messages: has a system message; expected none beside --system")
    return [*opening, *said[:-1], said[-1]._replace(input=prompt.input)], prompt.tools


def _answers(
    model: ChatModel, options: AnswerOptions, requests: list[Request], rows: int | None, raw: bool
) -> Iterator[str]:
    """Yield the answers in the order of the requests."""
    answers = {request: Answer(model.tokenizer, options.stop, continues=raw) for request in requests}
    waiting = iter(requests)
    first = next(waiting, None)
    for request, token in model.generate(requests, rows):
        if token is not None:
            answers[request].add(token)
            request.done = request.done or answers[request].stopped
        while first is not None and first.done:
            yield answers.pop(first).text
            first = next(waiting, None)


def read_prompts(source: Path) -> list[tuple[int, JSON]]:
    """Read the objects of a file of JSON lines, with their line numbers.

    Raises:
        DataError: there are none, or a line is no object.
    """
    try:
        content = source.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror}; expected a file of prompts") from None
    lines = ((number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip())
    found = [(number, _parse_object(line, f"{source}: line {number}")) for number, line in lines]
    if not found:
        raise DataError(f"{source}: expected at least one prompt, found none")
    return found


def _parse_object(line: bytes, where: str) -> JSON:
    try:
        value: Any = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise DataError(f"{where}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object with a prompt or messages, found {json_type(value)}")
    return value


@contextmanager
def _locked(target: Path) -> Iterator[BinaryIO]:
    """Open the file for this process alone."""
    try:
        with target.open("a+b") as file:
            lock(file, wait=False)
            yield file
    except BlockingIOError:
        raise DataError(f"{target}: another process writes it; expected another --output") from None
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror}") from None


def _count_answered(file: BinaryIO, target: Path, source: Path, prompts: list[JSON]) -> int:
    """Count the complete answers in the file; remove the beginning of another one."""
    file.seek(0)
    written = file.read()
    complete = written[: written.rfind(b"\n") + 1]
    lines = complete.splitlines()
    for number, line in enumerate(lines, start=1):
        answered = _parse_object(line, f"{target}: line {number}")
        answer, prompt = answered.pop(ANSWER, None), prompts[number - 1] if number <= len(prompts) else None
        if not isinstance(answer, str) or answered != prompt:
            raise DataError(f"{target}: line {number} answers no prompt of {source}; expected another --output")
    file.truncate(len(complete))
    return len(lines)
