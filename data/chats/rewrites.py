"""The same dialogue with less for a chat template to know.

Templates differ in what they take. Some refuse a system message, several messages of one role in a row, or tools. Each
function here takes one such thing out and says it in another way, so that nothing is lost; `data.chats.chat_template`
finds out which of them a template needs. The plain format, which knows questions and answers only, needs them all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from data.chats.chat import Chat
from data.chats.messages import JSON, Said, answer, call_id_of, said_in_chat
from data.prompts import (
    API_CALL,
    API_FINAL,
    API_RESULT,
    API_THOUGHT,
    API_TITLE,
    CHAT_CONTEXT,
    SYSTEM_TITLE,
    THINKING,
    Dialogue,
    Span,
    Turn,
)

Rewrite = Callable[[Sequence[Said]], list[Said]]


def rewrites(said: Sequence[Said], thoughts: bool) -> Iterator[Rewrite]:
    """Ways to say a dialogue, from as it is to what any template takes; those that change nothing more are left out.

    Args:
        thoughts: the template takes them.
    """
    seen: list[list[Said]] = []
    for with_calls in (list if thoughts else thoughts_as_text, _all_as_text):
        for merged in (list, runs_merged, _later_systems_asked, _systems_asked):

            def rewrite(said: Sequence[Said], first: Rewrite = with_calls, second: Rewrite = merged) -> list[Said]:
                return second(first(said))

            done = rewrite(said)
            if done not in seen:
                seen.append(done)
                yield rewrite


def _all_as_text(said: Sequence[Said]) -> list[Said]:
    return thoughts_as_text(calls_as_text(said))


def _later_systems_asked(said: Sequence[Said]) -> list[Said]:
    return runs_merged(systems_as_questions(said, from_place=1))


def _systems_asked(said: Sequence[Said]) -> list[Said]:
    return runs_merged(systems_as_questions(said))


def with_short_ids(said: Sequence[Said]) -> list[Said]:
    """Calls numbered by ids of nine letters and digits, the only ones that Mistral's templates take."""
    new: dict[str, str] = {}
    for each in said:
        for call_id in each.ids:
            new.setdefault(call_id, call_id_of(len(new) + 1))
    return [
        each._replace(
            calls=tuple(call._replace(id=new[call.id]) for call in each.calls),
            call_id=new.get(each.call_id or ""),
        )
        for each in said
    ]


def thoughts_as_text(said: Sequence[Said]) -> list[Said]:
    """An assistant's thoughts at the beginning of what it says."""
    return [
        answer((Span(THINKING.format(thought=each.reasoning), each.supervised), *each.spans), each.supervised)._replace(
            calls=each.calls
        )
        if each.reasoning
        else each
        for each in said
    ]


def tools_as_text(said: Sequence[Said], tools: list[JSON]) -> list[Said]:
    """The tools described in front of the first question."""
    text = CHAT_CONTEXT.format(title=API_TITLE, text=describe(tools))
    first = next((place for place, each in enumerate(said) if each.role == "user"), None)
    if first is None:
        return [Said("user", text.rstrip("\n")), *said]
    return [*said[:first], said[first]._replace(text=text + said[first].text), *said[first + 1 :]]


def describe(tools: list[JSON]) -> str:
    """Tools as text, one a line."""
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def calls_as_text(said: Sequence[Said]) -> list[Said]:
    """Calls, their results and the answer that follows as one answer; no loss on the results."""
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
    """An answer that calls tools before it is given."""
    spans: list[Span] = []
    results: list[Said] = []
    for place, each in enumerate(said):
        if each.role == "tool":
            continue
        thought = "\n".join(filter(None, [each.reasoning, each.text if each.calls else ""]))
        if thought:
            spans.append(Span(API_THOUGHT.format(thought=thought), each.supervised))
        results = []
        for other in said[place + 1 :]:
            if other.role != "tool":
                break
            results.append(other)
        for call in each.calls:
            param = json.dumps(call.arguments, ensure_ascii=False)
            spans.append(Span(API_CALL.format(name=call.name, param=param), each.supervised))
            found = next((result for result in results if result.call_id == call.id), None)
            if found:
                results.remove(found)
                spans.append(Span(API_RESULT.format(result=found.text), False))
            elif place + 1 < len(said) or call is not each.calls[-1]:
                spans.append(Span("\n", False))
        spans += [Span(API_RESULT.format(result=result.text), False) for result in results]
        if not each.calls:
            spans.append(Span(API_FINAL.format(ans=each.text), each.supervised))
    return answer(tuple(spans), [each for each in said if each.role == "assistant"][-1].supervised)


def systems_as_questions(said: Sequence[Said], from_place: int = 0) -> list[Said]:
    """System messages from a place on at the beginning of the question that follows them."""
    done: list[Said] = []
    waiting = ""
    for place, each in enumerate(said):
        if each.role == "system" and place >= from_place:
            waiting += each.text + "\n\n"
        elif each.role == "user" and waiting:
            done.append(each._replace(text=waiting + each.text))
            waiting = ""
        else:
            done.append(each)
    return [*done, Said("user", waiting.rstrip("\n"))] if waiting else done


def runs_merged(said: Sequence[Said]) -> list[Said]:
    """Questions that follow each other as one question, answers as one answer."""
    done: list[Said] = []
    for each in said:
        last = done[-1] if done else None
        if last and last.role == each.role == "user":
            done[-1] = last._replace(text=f"{last.text}\n{each.text}")
        elif last and last.role == each.role == "assistant" and not last.calls and not each.reasoning:
            spans = (*last.spans, Span("\n", last.supervised and each.supervised), *each.spans)
            done[-1] = answer(spans, each.supervised)._replace(reasoning=last.reasoning, calls=each.calls)
        else:
            done.append(each)
    return done


def plain_dialogue(chat: Chat) -> Dialogue:
    """A chat for the plain format, which has questions and answers only; what follows the last answer is left out."""
    said = said_in_chat(chat)
    contexts = []
    if said[0].role == "system":
        contexts.append((SYSTEM_TITLE, said.pop(0).text))
    if chat.tools:
        contexts.append((API_TITLE, describe(chat.tools)))
    said = runs_merged(systems_as_questions(_all_as_text(said)))
    turns = []
    ask = ""
    for each in said:
        if each.role == "user":
            ask = each.text
        else:
            turns.append(Turn(ask, each.spans, ends=each.supervised))
            ask = ""
    return Dialogue(tuple(turns), tuple(contexts))
