"""Tools that a model may call, and where results come from: a file, a command, or whoever sits at the keyboard."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from common.parent import together
from common.terminal import reason_of
from data.chat.answer_form import CallForm
from data.chat.messages import JSON, Call
from data.errors import DataError
from data.paths import read_small
from data.records.chat import Chat, Message
from data.records.record import explain, json_type

Results = Callable[[Call], str]


class Tools(NamedTuple):
    """What may be called.

    Attributes:
        schemas: for a chat template that takes tools; empty where they are described as text.
        form: in which such a template writes calls; None where calls are text.
        result: makes a call.
    """

    schemas: list[JSON]
    form: CallForm | None
    result: Results


def text_of(path: str) -> str:
    """A text file without the white space around it.

    Raises:
        DataError: it cannot be read, is empty or no UTF-8.
    """
    try:
        text = read_small(path).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start}: not UTF-8; expected a text in UTF-8") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}") from None
    if not text:
        raise DataError(f"{path}: expected a text, found none")
    return text


def schemas_in(path: str) -> list[JSON]:
    """The tools of a file, as a record of type chat has them.

    Raises:
        DataError: the file holds no list of tools with names.
    """
    asked = Message(role="assistant", content="?")
    try:
        tools = Chat(messages=[asked], tools=_json_in(path)).tools
    except ValidationError as error:
        raise DataError(f"{path}: {explain(error)}") from None
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{path}: tool {number}: expected an object with a function that has a name")
    if not tools:
        raise DataError(f"{path}: expected at least one tool, found none")
    return tools


def results_of_file(path: str) -> Results:
    """Results by the names of the tools: an object of texts, or of whatever a tool gives.

    Raises:
        DataError: the file holds no object; later, it has no result of a tool.
    """
    results = _json_in(path)
    if not isinstance(results, dict):
        raise DataError(f"{path}: expected an object of results by names, found {json_type(results)}")

    def result(call: Call) -> str:
        if call.name not in results:
            raise DataError(f"{path}: no result of {call.name}; expected it among {', '.join(results) or 'some'}")
        found = results[call.name]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    return result


def results_of_command(command: str) -> Results:
    """Results that a program prints, which gets each call as a JSON object on its standard input."""

    def result(call: Call) -> str:
        given = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False).encode()
        try:
            return subprocess.check_output(shlex.split(command), input=given, preexec_fn=together()).decode().strip()
        except (OSError, ValueError, IndexError, subprocess.CalledProcessError) as error:
            raise DataError(f"--api-command: {call.name}: {error}; expected a program that prints a result") from None

    return result


def results_typed(call: Call) -> str:
    """The result that is typed."""
    try:
        return input(f"\nresult of {call.name}> ").strip()
    except EOFError:
        raise DataError(
            f"no result of {call.name}: the input has ended; expected --api-results or --api-command"
        ) from None


def _json_in(path: str) -> Any:
    try:
        return from_json(text_of(path), allow_inf_nan=False)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: no JSON: {error}") from None
