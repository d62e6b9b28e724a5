"""Convert any kind of record into one list of messages for rendering.

`said_in` makes it. A chat template gets `as_dicts` of it, the plain format (`data.chat.plain`) writes it by itself, and
`data.chat.fallbacks` says in another way what a template does not take.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from data import prompt_texts as texts
from data.chat.rendered import Span
from data.images.marks import numbers_in, parts_of
from data.records.chat import Chat
from data.records.record import ApiAnswer, ConverHasApi, Conversation, Instruct, RefQA
from data.settings import Mask

JSON = dict[str, Any]


Dialogue = Chat | Instruct | Conversation | ConverHasApi | RefQA


class Call(NamedTuple):
    """Hold a tool call; every call has an id, since some templates ask for one."""

    id: str
    name: str
    arguments: JSON


class Said(NamedTuple):
    """Hold one message."""

    role: str  # system, user, assistant or tool; context for a reference text, whose title is `name`
    text: str
    reasoning: str = ""  # what an assistant thought first
    calls: tuple[Call, ...] = ()  # an assistant's calls
    call_id: str | None = None  # of the call that a tool's message answers
    name: str | None = None  # of that tool
    supervised: bool = False  # an assistant's message is trained, its end of turn included
    # The text in trained and untrained pieces, where that differs from `supervised`; else empty.
    pieces: tuple[Span, ...] = ()
    # Of a user: what the question is about, which may be empty; None where it is no instruction of an `instruct`.
    input: str | None = None
    source: Any = None  # what a record has in its place, where the text is not to the letter

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the text in pieces."""
        return self.pieces or (Span(self.text, self.supervised),)

    @property
    def ids(self) -> list[str]:
        """Return the ids of its calls, or of the call that it answers."""
        return [call.id for call in self.calls] if self.call_id is None else [self.call_id]


def said_in(record: Dialogue) -> list[Said]:
    """Convert a record to messages; in a conversation, consecutive questions are merged, and answers too."""
    said = each_said_in(record)
    if isinstance(record, (Chat, Instruct)):
        return said
    return runs_merged(said[: max(place for place, message in enumerate(said) if message.role == "assistant") + 1])


def each_said_in(record: Dialogue) -> list[Said]:
    """Convert a record to messages as they stand there."""
    if isinstance(record, Chat):
        return _said_in_chat(record)
    if isinstance(record, Instruct):
        question = Said("user", record.instruct, input=record.input or "")
        return [question, Said("assistant", record.output, supervised=True)]
    said: list[Said] = []
    if isinstance(record, RefQA):
        said.append(Said("context", record.reference, name=texts.REFERENCE_TITLE))
    elif isinstance(record, ConverHasApi):
        said.append(Said("context", as_text(record.api_desc), name=texts.API_TITLE, source=record.api_desc))
    for role, content in record.rounds:
        if role == "ask":
            said.append(Said("user", str(content)))
        else:
            spans = _api_spans(content) if isinstance(content, ApiAnswer) else (Span(content, True),)
            said.append(answer(spans, True)._replace(source=content))
    return said


def last_question(said: Sequence[Said]) -> int:
    """Find the last question's index; -1 if there is none."""
    return max((place for place, message in enumerate(said) if message.role == "user"), default=-1)


def with_mask(said: Sequence[Said], mask: Mask) -> Sequence[Said]:
    """Set which messages are trained, as the config says; `all` is handled elsewhere."""
    if mask != "last_turn":
        return said
    answers = [place for place, message in enumerate(said) if message.role == "assistant"]
    asked = last_question(said[: answers[-1]])
    return [message._replace(supervised=False, pieces=()) for message in said[: asked + 1]] + list(said[asked + 1 :])


def runs_merged(said: Sequence[Said]) -> list[Said]:
    """Merge consecutive questions into one, and consecutive answers."""
    done: list[Said] = []
    for message in said:
        last = done[-1] if done else None
        if last and last.role == message.role == "user":
            done[-1] = last._replace(text=f"{_asked(last)}\n{_asked(message)}", input=None)
        elif last and last.role == message.role == "assistant" and not last.calls and not message.reasoning:
            spans = (*last.spans, Span("\n", last.supervised and message.supervised), *message.spans)
            done[-1] = answer(spans, message.supervised)._replace(reasoning=last.reasoning, calls=message.calls)
        else:
            done.append(message)
    return done


def in_questions(said: Sequence[Said]) -> list[Said]:
    """Move contexts into the question that follows, as several templates refuse system messages."""
    done: list[Said] = []
    context = ""
    for message in said:
        if message.role == "context":
            context += texts.CHAT_CONTEXT.format(title=message.name, text=message.text)
            continue
        if context and message.role != "user":  # an answer that nobody asked for
            done.append(Said("user", context.rstrip("\n")))
            context = ""
        is_plain = not (context or message.input)
        done.append(message if is_plain else message._replace(text=context + _asked(message), input=None))
        context = ""
    return done


class Form(NamedTuple):
    """Hold what templates expect in different ways."""

    parts: bool = False  # a content is a list of parts, as where there may be images
    text: bool = False  # the arguments are JSON, and no object
    none: bool = False  # a message that only calls has None as its content, and no empty text


def as_dicts(said: Sequence[Said], form: Form) -> list[JSON]:
    """Make the dicts for a chat template; empty keys are left out."""
    messages = []
    for each in said:
        content: Any = [{"type": "text", "text": each.text}] if form.parts else each.text
        if numbers_in(each.text):
            content = parts_of(each.text)
        if form.none and each.calls and not each.text:
            content = None
        message: JSON = {"role": each.role, "content": content}
        if each.reasoning:  # templates read one of these
            message["reasoning_content"] = message["reasoning"] = message["thinking"] = each.reasoning
        if each.calls:
            message["tool_calls"] = [_call_as_dict(call, form) for call in each.calls]
        if each.call_id is not None:
            message["tool_call_id"] = each.call_id
        if each.name is not None:
            message["name"] = each.name
        messages.append(message)
    return messages


def _call_as_dict(call: Call, form: Form) -> JSON:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if form.text else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def as_record(said: Sequence[Said]) -> list[JSON]:
    """Write messages as a chat record with one name for everything."""
    messages = as_dicts(in_questions(said), Form())
    for message in messages:
        for other_name in ("reasoning", "thinking"):
            message.pop(other_name, None)
    return messages


def as_text(value: Any, indent: int | None = None) -> str:
    """Return a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=indent)


def call_id_of(number: int) -> str:
    """Make an id of nine letters and digits; Mistral's templates accept no other."""
    return f"call{number:05d}"


def answer(spans: tuple[Span, ...], ends: bool) -> Said:
    """Make an assistant's message of pieces; its end of turn is trained if `ends`."""
    uniform = all(span.supervised == ends for span in spans)
    return Said("assistant", "".join(span.text for span in spans), supervised=ends, pieces=() if uniform else spans)


def without_end(said: Said, end: str) -> Said:
    """Take the end of its turn, which a format writes behind each answer, off one that has it already."""
    bare = said.text.rstrip().removesuffix(end)
    if said.role != "assistant" or said.calls or bare == said.text.rstrip():
        return said
    *before, last = said.spans
    return said._replace(text=bare, pieces=(*before, last._replace(text=last.text.rstrip().removesuffix(end))))


def _asked(said: Said) -> str:
    return texts.CHAT_INPUT.format(ask=said.text, input=said.input) if said.input else said.text


def _said_in_chat(chat: Chat) -> list[Said]:
    """Convert a chat; calls without an id get one, results without one answer calls in order."""
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


def _api_spans(said: ApiAnswer) -> tuple[Span, ...]:
    spans = []
    for action in said.actions:
        param = json.dumps(action.api_param, ensure_ascii=False)
        thought = texts.API_THOUGHT.format(thought=action.inner_thought)
        call = thought + texts.API_CALL.format(name=action.api_name, param=param)
        spans += [Span(call, True), Span(texts.API_RESULT.format(result=as_text(action.api_res)), False)]
    return (*spans, Span(texts.API_FINAL.format(ans=said.ans), True))
