"""Define the chat-API dialogue: messages with roles, tools and tool calls.

Every other dialogue format is turned into it (`data.records.formats`); a message may be written as OpenAI, ShareGPT or
one of their relatives does. The assistant's messages are trained, tool calls included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import from_json

from data.images.in_records import Illustrated
from data.records.fields import SWITCHES, check_grades, from_text, unused_fields
from data.settings import TemplateArguments

ROLES = {
    **dict.fromkeys(["system", "developer"], "system"),
    **dict.fromkeys(["user", "human"], "user"),
    **dict.fromkeys(
        ["assistant", "gpt", "chatgpt", "chatbot", "model", "bot", "function_call", "tool_call"], "assistant"
    ),
    **dict.fromkeys(["tool", "observation", "function", "function_response", "tool_response"], "tool"),
}
CALLS = ("function_call", "tool_call")  # what such a sender says is a JSON object with name and arguments, or several
# Other names of a message's fields.
SPELLINGS: dict[str, Sequence[str]] = {
    "role": ("from",),
    "content": ("value", "text", "refusal"),
    "reasoning_content": ("reasoning", "thinking"),
}
PARTS = {"thinking": 0, "tool_result": 1, "tool_use": 3}  # Anthropic's, in their order; texts are 2
TEXTS = (None, "text", "input_text", "output_text")  # types of parts


class Function(BaseModel):
    """Hold the name and arguments of a tool call."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        return {} if value is None or value == "" else from_text(value, "an object")


class ToolCall(BaseModel):
    """Hold a tool call."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    """Hold one message; refuse fields that matter, and note unused ones in the validation context (a set of names)."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""  # what is said; absent where an assistant only calls tools
    reasoning_content: str | None = None  # what an assistant thought first, where it is kept apart
    tool_calls: list[ToolCall] = Field(default_factory=list, fail_fast=True)  # an assistant's calls
    tool_call_id: str | None = None  # of the call that a tool's message answers
    name: str | None = None  # of the tool that a tool's message comes from
    weight: Literal[0, 1] = 1  # 0 for an assistant's message without loss

    @model_validator(mode="before")
    @classmethod
    def _respell(cls, message: Any, info: ValidationInfo) -> Any:
        if not isinstance(message, dict):
            return message
        if info.context is not None and message.get("name") and message.get("role") in ("user", "assistant", "system"):
            info.context.add("messages.name")
        spelled_so = message.keys() <= cls.model_fields.keys() and None not in message.values()
        if spelled_so and message.get("content") and message.get("role") not in CALLS:
            return message

        message = {name: value for name, value in message.items() if value is not None}
        for name, others in SPELLINGS.items():
            for other in others:
                if other in message and name not in message:
                    message[name] = message.pop(other)

        if "role" not in message:
            raise ValueError("role: missing")
        _take_calls(message)
        _take_switches(message)
        _check_unused(info, "messages", {name: message[name] for name in message.keys() - cls.model_fields.keys()})
        if not message.keys() & {"content", "tool_calls", "reasoning_content"}:
            raise ValueError("content: expected a text, found none")
        return message

    @field_validator("role", mode="before")
    @classmethod
    def _rename(cls, role: Any) -> Any:
        if not isinstance(role, str):
            return role  # pydantic says what is wrong
        if role.lower() not in ROLES:
            raise ValueError(f"expected one of {', '.join(ROLES)}, found {role[:40]!r}")
        return ROLES[role.lower()]

    @field_validator("content", mode="before")
    @classmethod
    def _join(cls, content: Any, info: ValidationInfo) -> Any:
        """Join text parts and write a tool's object as JSON."""
        if isinstance(content, dict):
            if info.data.get("role") == "tool":
                return json.dumps(content, ensure_ascii=False)
            content = [content]
        return "".join(_text_of(part, info) for part in content) if isinstance(content, list) else content


def _text_of(part: Any, info: ValidationInfo) -> str:
    """Return a part's text; a model's refusal to answer (OpenAI) is its answer."""
    kind = part.get("type") if isinstance(part, dict) else None
    named = "refusal" if kind == "refusal" and info.data.get("role") == "assistant" else "text"
    known = kind in TEXTS or named == "refusal"
    if not (isinstance(part, dict) and known and isinstance(part.get(named), str)):
        found = "" if known else f", found one of type {kind!r:.40}"
        raise ValueError(f"expected a text or a list of parts with a text each{found}")
    if switched := next(iter(SWITCHES & part.keys()), None):
        raise ValueError(f"{switched}: parts of one message cannot be trained apart; expected it of the message")
    _check_unused(info, "messages.content", {name: part[name] for name in part.keys() - {"type", named}})
    return str(part[named])


class Chat(Illustrated):
    """Hold a dialogue whose assistant messages are trained."""

    type: Literal["chat"] = "chat"
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    # What the assistant may call, as OpenAI writes it: `{"type": "function", "function": {name, ...}}` with a JSON
    # schema of the parameters. A bare function, `{name, ...}`, is put into that frame.
    tools: list[dict[str, Any]] = Field(default_factory=list, fail_fast=True)
    # What the chat template gets beside them, such as `enable_thinking`, over the config's template_args.
    chat_template_kwargs: TemplateArguments = {}

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _arguments(cls, given: Any) -> Any:
        given = from_text(given, "an object") if given else {}
        return {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else given

    @field_validator("tools", mode="before")
    @classmethod
    def _schemas(cls, tools: Any) -> Any:
        tools = from_text(tools, "a list") if tools else []
        return [_without_nulls(_as_tool(tool)) for tool in tools] if isinstance(tools, list) else tools

    @model_validator(mode="after")
    def _check(self) -> Chat:
        functions = [tool["function"] for tool in self.tools if isinstance(tool.get("function"), dict)]
        declared = {str(each.get("name")): each.get("parameters") for each in functions}
        for call in chain.from_iterable(message.tool_calls for message in self.messages):
            schema = declared.get(call.function.name)
            known = schema.get("properties") if isinstance(schema, dict) else None
            if isinstance(known, dict):  # a table puts a null for each argument of any other tool
                given = call.function.arguments.items()
                call.function.arguments = {k: v for k, v in given if v is not None or k in known}
        for place, message in enumerate(self.messages):
            if message.role != "assistant" and (message.tool_calls or message.reasoning_content):
                name = "tool_calls" if message.tool_calls else "reasoning_content"
                raise ValueError(f"messages[{place}].{name}: expected it of the assistant alone, not of {message.role}")
        return self

    @property
    def answered(self) -> bool:
        """Say whether a message of the assistant is trained."""
        return any(message.role == "assistant" and message.weight for message in self.messages)


class Unanswered(Chat):
    """Hold a dialogue whose class is learnt and whose last message is nobody's answer: it is written up to there."""


def split_parts(messages: list[Any]) -> list[Any]:
    """Write messages whose contents are Anthropic's parts (thinking, tool_use, tool_result) as chat APIs do.

    Each result becomes a message of the tool; what else a user says there follows.

    Raises:
        ValueError: a thought is no text, or parts stand in an order that messages cannot keep.
    """
    made: list[Any] = []
    for place, message in enumerate(messages):
        parts = message.get("content") if isinstance(message, dict) else None
        known = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
        kinds = [str(part.get("type")) for part in parts] if known and parts else []
        if not parts or not PARTS.keys() & {*kinds}:
            made.append(message)
            continue
        if kinds != sorted(kinds, key=lambda kind: PARTS.get(kind, 2)):
            order = "tool_result, text" if "tool_result" in kinds else "thinking, text, tool_use"
            raise ValueError(f"parts of message {place}: expected {order} in this order, found {', '.join(kinds)}")

        thoughts, results, uses = (_of_kind(parts, kind) for kind in PARTS)
        if not all(isinstance(part.get("thinking"), str) for part in thoughts):
            raise ValueError(f"parts of message {place}: thinking: expected a text")
        said = {
            "reasoning_content": "".join(part["thinking"] for part in thoughts),
            "content": [part for part in parts if part.get("type") not in PARTS],
            "tool_calls": [
                {"id": part.get("id"), "function": {"name": part.get("name"), "arguments": part.get("input")}}
                for part in uses
            ],
        }

        rest = {name: value for name, value in message.items() if name != "content"}
        for part in results:
            result = {"content": part.get("content") or "", "tool_call_id": part.get("tool_use_id")}
            made.append(rest | result | {"role": "tool", "is_error": part.get("is_error") or None})
        if any(said.values()):
            made.append(rest | {name: value for name, value in said.items() if value})
    return made


def _of_kind(parts: list[Any], kind: str) -> list[Any]:
    return [part for part in parts if part.get("type") == kind]


def _check_unused(info: ValidationInfo, where: str, extra: dict[str, Any]) -> None:
    """Refuse the fields that matter, and note the others."""
    check_grades(extra)
    unused = unused_fields(extra, lambda: "")
    if info.context is not None:
        info.context.update(f"{where}.{name}" for name in unused)


def _take_calls(message: dict[str, Any]) -> None:
    """Make `function_call`, the older form, or the words of a sender of that name the message's `tool_calls`."""
    if "function_call" in message and not message.get("tool_calls"):
        message["tool_calls"] = [{"function": message.pop("function_call")}]
    if message["role"] not in CALLS:
        return
    calls = message.pop("content", None)
    try:
        calls = from_json(calls, allow_inf_nan=False) if isinstance(calls, str) else calls
        calls = [Function.model_validate(call) for call in (calls if isinstance(calls, list) else [calls])]
    except ValueError:
        raise ValueError(
            f"the {message['role']} is not JSON with name and arguments; expected an object or a list of them"
        ) from None
    message["tool_calls"] = [{"function": call} for call in calls]


def _take_switches(message: dict[str, Any]) -> None:
    """Turn every way to say whether a message is trained into its `weight`."""
    for name in SWITCHES & message.keys() - {"weight"}:
        switch = message.pop(name)
        if switch not in (0, 1):
            raise ValueError(f"{name}: expected true or false, found {switch!r}")
        if switch and name != "loss" and ROLES.get(str(message["role"]).lower()) != "assistant":
            raise ValueError(f"{name}: expected false, as only an assistant's messages are trained")
        message["weight"] = min(int(switch), message.get("weight", 1))


def _without_nulls(schema: Any) -> Any:
    """Drop the nulls that a table adds to a schema, except where null is a default or a constant."""
    if isinstance(schema, dict):
        kept = {name: each for name, each in schema.items() if each is not None or name in ("default", "const")}
        return {name: each if name in ("enum", "examples") else _without_nulls(each) for name, each in kept.items()}
    return [_without_nulls(each) for each in schema] if isinstance(schema, list) else schema


def _as_tool(tool: Any) -> Any:
    bare = isinstance(tool, dict) and "function" not in tool and "name" in tool
    return {"type": "function", "function": tool} if bare else tool
