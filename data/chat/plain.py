"""The plain format: the well-known instruction prompt, for tokenizers without a chat template.

It knows questions and answers only. System messages, tools and their calls are said in the words of
`data.chat.prompts`; what follows the last answer is left out. Each answer is followed by the end of sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from data.chat.fallbacks import calls_as_text, describe, systems_as_questions, thoughts_as_text
from data.chat.messages import JSON, Said, runs_merged
from data.chat.written import Span, Written, join
from data.prompt_texts import (
    API_TITLE,
    PLAIN_ANSWER,
    PLAIN_ASK,
    PLAIN_ASK_WITH_INPUT,
    PLAIN_CONTEXT,
    PLAIN_HEADER,
    PLAIN_HEADER_WITH_INPUT,
    SYSTEM_TITLE,
)


def write_plain(said: Sequence[Said], tools: list[JSON], end: str, open_end: bool = False) -> Written:
    """A dialogue as text.

    Args:
        end: the end of sequence.
        open_end: the last message is a question, and the text ends where its answer begins.
    """
    said = list(said)
    contexts: list[tuple[str | None, str]] = []
    if said[0].role == "system":
        contexts.append((SYSTEM_TITLE, said.pop(0).text))
    if tools:
        contexts.append((API_TITLE, describe(tools)))
    contexts += [(each.name, each.text) for each in said if each.role == "context"]
    said = [each for each in said if each.role != "context"]
    said = runs_merged(systems_as_questions(thoughts_as_text(calls_as_text(said))))
    prompt = PLAIN_HEADER_WITH_INPUT if said and said[0].input else PLAIN_HEADER
    prompt += "".join(PLAIN_CONTEXT.format(title=title, text=text) for title, text in contexts)
    spans: list[Span] = []
    asked = PLAIN_ANSWER
    for each in said:
        if each.role == "user":
            form = PLAIN_ASK_WITH_INPUT if each.input else PLAIN_ASK
            asked = form.format(ask=each.text, input=each.input)
        else:
            spans += [Span(prompt + asked, False), *each.spans, Span(end, each.supervised)]
            prompt, asked = "\n\n", PLAIN_ANSWER
    return join([*spans, Span(prompt + asked, False)] if open_end else spans)
