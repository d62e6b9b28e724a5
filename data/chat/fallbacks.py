"""Rewrite a dialogue without features that a chat template does not support.

Templates differ in what they take. Some refuse system messages, roles that do not alternate, tools or thoughts; some
leave them out without a word. Each `Feature` here is one such thing: a dialogue that tries whether a template takes
it, and how to say it otherwise. What a template supports depends on it alone, so all records of a run are
written in the same way. A feature refused in one record only is that record's fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from data.chat.messages import JSON, Call, Said, answer, call_id_of, in_questions, runs_merged
from data.chat.rendered import Span
from data.prompt_texts import API_CALL, API_FINAL, API_RESULT, API_THOUGHT, API_TITLE, THINKING
from data.settings import Fallback

Rewrite = Callable[[Sequence[Said], list[JSON]], tuple[list[Said], list[JSON]]]

SYSTEM, QUESTION, ANSWER = Said("system", "Be brief."), Said("user", "Why?"), Said("assistant", "So.", supervised=True)


def calling(call_id: str) -> tuple[Said, ...]:
    """Make a dialogue with a call."""
    call = Call(call_id, "look", {"up": "it"})
    return QUESTION, Said("assistant", "", calls=(call,)), Said("tool", "Found.", call_id=call_id, name="look"), ANSWER


CALLING, NAMED_BY_ID, LONG_ID = calling(call_id_of(1)), calling("functions.look:0"), calling("call-1")
TRIED_TOOL = "Tries whether tools are described."
_SCHEMA: JSON = {"type": "object", "properties": {"up": {"type": "string", "description": "what"}}, "required": ["up"]}
EXAMPLE_TOOL: JSON = {
    "type": "function",
    "function": {"name": "look", "description": TRIED_TOOL, "parameters": _SCHEMA},
}


class Feature(NamedTuple):
    """Describe a feature that not every template supports."""

    name: str  # in a message, behind "the chat template takes no"
    default: Fallback  # what becomes of it where nothing is asked for
    present: Callable[[Sequence[Said], list[JSON]], bool]  # whether a dialogue has it
    # Dialogues, with their tools, that a template takes whole which takes it; one of them if `any_of`.
    tried: tuple[tuple[Sequence[Said], list[JSON]], ...]
    rewrite: Rewrite  # the dialogue without it
    replacement: str  # how it is said then
    any_of: bool = False


def _with_question(said: Sequence[Said], tools: list[JSON]) -> tuple[list[Said], list[JSON]]:
    place = next(place for place, message in enumerate(said) if message.role == "assistant")
    return [*said[:place], Said("user", ""), *said[place:]], tools


FEATURES = (
    Feature(
        "calls of tools",
        "refuse",
        lambda said, tools: any(each.calls or each.role == "tool" for each in said),
        ((CALLING, []), (CALLING, [EXAMPLE_TOOL]), (NAMED_BY_ID, [])),
        lambda said, tools: (tools_as_text(calls_as_text(said), tools), []),
        "as text",
        any_of=True,
    ),
    Feature(
        "tools",
        "refuse",
        lambda said, tools: bool(tools),
        ((CALLING, [EXAMPLE_TOOL]), (NAMED_BY_ID, [EXAMPLE_TOOL])),
        lambda said, tools: (tools_as_text(said, tools), []),
        "in the question",
        any_of=True,
    ),
    Feature(
        "thoughts",
        "refuse",
        lambda said, tools: any(each.reasoning for each in said),
        (((QUESTION, ANSWER._replace(reasoning="Hm.")), []),),
        lambda said, tools: (thoughts_as_text(said), tools),
        "at the beginning of the answer",
    ),
    Feature(
        "system message",
        "rewrite",
        lambda said, tools: any(each.role == "system" for each in said),
        (((SYSTEM, QUESTION, ANSWER), []), ((SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER), [])),
        lambda said, tools: (systems_as_questions(said), tools),
        "at the beginning of the question that follows",
    ),
    Feature(
        "system message behind the first message",
        "rewrite",
        lambda said, tools: any(each.role == "system" for each in said[1:]),
        (((QUESTION, ANSWER, SYSTEM, QUESTION, ANSWER), []),),
        lambda said, tools: (systems_as_questions(said, from_place=1), tools),
        "at the beginning of the question that follows",
    ),
    Feature(
        "two messages of one role in a row",
        "rewrite",
        lambda said, tools: any(a.role == b.role and a.role in ("user", "assistant") for a, b in pairwise(said)),
        (((QUESTION, QUESTION, ANSWER, ANSWER, QUESTION, ANSWER), []),),
        lambda said, tools: (runs_merged(said), tools),
        "as one message",
    ),
    Feature(
        "answer without a question",
        "rewrite",
        lambda said, tools: [each.role for each in said if each.role != "system"][:1] == ["assistant"],
        (((ANSWER, QUESTION, ANSWER), []),),
        _with_question,
        "behind an empty question",
    ),
)


def with_short_ids(said: Sequence[Said]) -> list[Said]:
    """Number calls by ids of nine letters and digits, the only ones that Mistral's templates accept."""
    new: dict[str, str] = {}
    renamed = []
    for message in said:
        for call_id in message.ids:
            new.setdefault(call_id, call_id_of(len(new) + 1))
        calls = tuple(call._replace(id=new[call.id]) for call in message.calls)
        renamed.append(message._replace(calls=calls, call_id=new.get(message.call_id or "")))
    return renamed


def thoughts_as_text(said: Sequence[Said]) -> list[Said]:
    """Put an assistant's thoughts at the beginning of its words."""
    written = []
    for message in said:
        if not message.reasoning:
            written.append(message)
            continue
        thought = Span(THINKING.format(thought=message.reasoning), message.supervised)
        written.append(answer((thought, *message.spans), message.supervised)._replace(calls=message.calls))
    return written


def tools_as_text(said: Sequence[Said], tools: list[JSON]) -> list[Said]:
    """Describe the tools in front of the first question."""
    if not tools:
        return list(said)
    first = next((place for place, message in enumerate(said) if message.role == "user"), 0)
    return in_questions([*said[:first], Said("context", list_tools(tools), name=API_TITLE), *said[first:]])


def list_tools(tools: list[JSON]) -> str:
    """Write tools as text, one a line."""
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def calls_as_text(said: Sequence[Said]) -> list[Said]:
    """Join calls, results and the answer that follows into one answer; results are not trained."""
    done: list[Said] = []
    place = 0
    while place < len(said):
        each = said[place]
        end = place + 1
        if each.calls:
            while end < len(said) and said[end].role in ("assistant", "tool"):
                end += 1
            each = _chain(said[place:end])
        elif each.role == "tool":  # a result that nobody asked for
            each = Said("user", each.text)
        done.append(each)
        place = end
    return done


def _chain(said: Sequence[Said]) -> Said:
    """Build one answer of a chain of calls and results."""
    spans: list[Span] = []
    for place, message in enumerate(said):
        if message.role == "tool":
            continue
        thought = "\n".join(filter(None, [message.reasoning, message.text if message.calls else ""]))
        if thought:
            spans.append(Span(API_THOUGHT.format(thought=thought), message.supervised))

        results = list(takewhile(lambda other: other.role == "tool", said[place + 1 :]))
        for call in message.calls:
            param = json.dumps(call.arguments, ensure_ascii=False)
            spans.append(Span(API_CALL.format(name=call.name, param=param), message.supervised))
            found = next((result for result in results if result.call_id == call.id), None)
            if found:
                results.remove(found)
                spans.append(Span(API_RESULT.format(result=found.text), False))
            elif place + 1 < len(said) or call is not message.calls[-1]:
                spans.append(Span("\n", False))
        spans += [Span(API_RESULT.format(result=result.text), False) for result in results]
        if not message.calls and message.text.strip():
            spans.append(Span(API_FINAL.format(ans=message.text), message.supervised))
    # Behind a call or a result the model has nothing to say yet, so that it does not end its turn there.
    last = said[-1]
    return answer(tuple(spans), last.supervised and bool(last.text.strip()) and not last.calls)


def systems_as_questions(said: Sequence[Said], from_place: int = 0) -> list[Said]:
    """Move system messages from a place on into the question that follows them."""
    done: list[Said] = []
    waiting = ""
    for place, message in enumerate(said):
        if message.role == "system" and place >= from_place:
            waiting += message.text + "\n\n"
        elif message.role == "user" and waiting:
            done.append(message._replace(text=waiting + message.text))
            waiting = ""
        else:
            done.append(message)
    return [*done, Said("user", waiting.rstrip("\n"))] if waiting else done
