"""The messages of a dialogue as a chat template gets them.

Every dialogue becomes a list of `Said`, one a message; `data.chats.rewrites` says in another way what a template
refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from data.chats.chat import Chat
from data.prompts import CHAT_CONTEXT, CHAT_INPUT, Dialogue, Span

JSON = dict[str, Any]


class Call(NamedTuple):
    """A call of a tool; every call has an id, since some templates ask for one."""

    id: str
    name: str
    arguments: JSON


class Said(NamedTuple):
    """One message.

    Attributes:
        reasoning: what an assistant thought first.
        calls: an assistant's calls.
        call_id, name: of the call that a tool's message answers, and of the tool.
        supervised: an assistant's message bears loss, its end of turn included.
        pieces: the text in pieces with and without loss, where that differs from `supervised`; else empty.
    """

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None
    supervised: bool = False
    pieces: tuple[Span, ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        """The text in pieces."""
        return self.pieces or (Span(self.text, self.supervised),)

    @property
    def ids(self) -> list[str]:
        """Of its calls, or of the call that it answers."""
        return [call.id for call in self.calls] if self.call_id is None else [self.call_id]


def said_in_chat(chat: Chat) -> list[Said]:
    """The messages of a chat. Calls without an id get one; results without one answer the calls in their order."""
    said: list[Said] = []
    waiting: list[Call] = []
    count = 0
    for message in chat.messages:
        if message.role == "assistant":
            calls = []
            for call in message.tool_calls:
                count += 1
                calls.append(Call(call.id or call_id_of(count), call.function.name, call.function.arguments))
            waiting = list(calls)
            thought = message.reasoning_content or ""
            said.append(Said("assistant", message.content, thought, tuple(calls), supervised=bool(message.weight)))
        elif message.role == "tool":
            fitting = [call for call in waiting if call.id == message.tool_call_id] or waiting
            answered = fitting[0] if fitting else Call(call_id_of(0), "", {})
            if fitting:
                waiting.remove(answered)
            call_id = message.tool_call_id or answered.id
            said.append(Said("tool", message.content, call_id=call_id, name=message.name or answered.name or None))
        else:
            said.append(Said(message.role, message.content))
    return said


def said_in_dialogue(dialogue: Dialogue) -> list[Said]:
    """Questions and answers in turn; the context goes into the first question, as several templates refuse systems."""
    said: list[Said] = []
    for turn in dialogue.turns:
        ask = CHAT_INPUT.format(ask=turn.ask, input=turn.input) if turn.input else turn.ask
        if not said:
            ask = "".join(CHAT_CONTEXT.format(title=title, text=text) for title, text in dialogue.contexts) + ask
        said += [*([Said("user", ask)] if ask else []), answer(turn.answer, turn.ends)]
    return said


def as_dicts(said: Sequence[Said]) -> list[JSON]:
    """What a chat template gets; a key stands there only where it says something."""
    messages = []
    for each in said:
        message: JSON = {"role": each.role, "content": each.text}
        if each.reasoning:
            message["reasoning_content"] = message["thinking"] = each.reasoning  # gpt-oss reads the second
        if each.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in each.calls
            ]
        if each.call_id is not None:
            message["tool_call_id"] = each.call_id
        if each.name is not None:
            message["name"] = each.name
        messages.append(message)
    return messages


def call_id_of(number: int) -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return f"call{number:05d}"


def answer(spans: tuple[Span, ...], ends: bool) -> Said:
    """An assistant's message in pieces; its end of turn bears loss if `ends`."""
    uniform = all(span.supervised == ends for span in spans)
    return Said("assistant", "".join(span.text for span in spans), supervised=ends, pieces=() if uniform else spans)
