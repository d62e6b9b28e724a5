"""A dialogue in the form that chat APIs use: messages with roles, tools, and calls of tools.

It is the form that every other dialogue format is turned into (`data.files.formats`). Loss is on the messages of the
assistant, its calls of tools included.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import from_json


class Function(BaseModel):
    """Which tool is called, and with what."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return {} if value is None else value
        try:
            return from_json(value or "{}", allow_inf_nan=False)
        except ValueError:
            raise ValueError("expected an object or a JSON string of one") from None


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    """One message.

    Attributes:
        content: what is said; absent where an assistant only calls tools.
        reasoning_content: what an assistant thought first, where it is kept apart.
        tool_calls: an assistant's calls.
        tool_call_id: of the call that a tool's message answers.
        name: of the tool that a tool's message comes from.
        weight: 0 for an assistant's message without loss.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = Field(default=[], fail_fast=True)
    tool_call_id: str | None = None
    name: str | None = None
    weight: Literal[0, 1] = 1

    @model_validator(mode="before")
    @classmethod
    def _single_call(cls, message: Any) -> Any:
        """`function_call`, the older form, becomes the only one of the `tool_calls`."""
        if isinstance(message, dict) and message.get("function_call") and not message.get("tool_calls"):
            return message | {"tool_calls": [{"function": message["function_call"]}]}
        return message

    @field_validator("role", mode="before")
    @classmethod
    def _rename(cls, role: Any) -> Any:
        return {"developer": "system", "function": "tool"}.get(role, role) if isinstance(role, str) else role

    @field_validator("content", mode="before")
    @classmethod
    def _join(cls, content: Any) -> Any:
        """Parts of text are joined; null is no text."""
        if content is None:
            return ""
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise ValueError("expected a text or a list of parts with a text each")
            return "".join(part["text"] for part in content)
        return content

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _no_calls(cls, calls: Any) -> Any:
        return [] if calls is None else calls


class Chat(BaseModel):
    """A dialogue; loss on the assistant's messages.

    Attributes:
        tools: what the assistant may call, as OpenAI writes it: `{"type": "function", "function": {name, ...}}` with a
            JSON schema of the parameters. A bare function, `{name, ...}`, is put into that frame.
    """

    type: Literal["chat"] = "chat"
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    tools: list[dict[str, Any]] = Field(default=[], fail_fast=True)

    @field_validator("tools", mode="before")
    @classmethod
    def _schemas(cls, tools: Any) -> Any:
        if isinstance(tools, str):  # datasets often keep them as a JSON string
            try:
                tools = from_json(tools or "[]", allow_inf_nan=False)
            except ValueError:
                raise ValueError("expected a list or a JSON string of one") from None
        if not isinstance(tools, list):
            return [] if tools is None else tools  # pydantic says what is wrong
        return [_as_tool(tool) for tool in tools]

    @model_validator(mode="after")
    def _check(self) -> Chat:
        if not any(message.role == "assistant" and message.weight for message in self.messages):
            raise ValueError("messages: expected at least one of the assistant, found none that bears loss")
        return self


def _as_tool(tool: Any) -> Any:
    bare = isinstance(tool, dict) and "function" not in tool and "name" in tool
    return {"type": "function", "function": tool} if bare else tool
