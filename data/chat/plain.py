"""Write the plain format, an instruction prompt for tokenizers without a chat template.

It knows questions and answers only. System messages, tools and their calls are said in the words of
`data.chat.prompts`; what follows the last answer is left out. Each answer is followed by the end of sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from data import prompt_texts as texts
from data.chat.fallbacks import calls_as_text, list_tools, systems_as_questions, thoughts_as_text
from data.chat.messages import JSON, Said, runs_merged
from data.chat.rendered import RenderedText, Span, join


def write_plain(said: Sequence[Said], tools: list[JSON], end: str, open_end: bool = False) -> RenderedText:
    """Write a dialogue as text.

    Args:
        end: the end of sequence.
        open_end: the last message is a question, and the text ends where its answer begins.
    """
    said = list(said)
    contexts: list[tuple[str | None, str]] = []
    if said[0].role == "system":
        contexts.append((texts.SYSTEM_TITLE, said.pop(0).text))
    if tools:
        contexts.append((texts.API_TITLE, list_tools(tools)))
    contexts += [(message.name, message.text) for message in said if message.role == "context"]
    said = [message for message in said if message.role != "context"]
    said = runs_merged(systems_as_questions(thoughts_as_text(calls_as_text(said))))

    prompt = texts.PLAIN_HEADER_WITH_INPUT if said and said[0].input else texts.PLAIN_HEADER
    prompt += "".join(texts.PLAIN_CONTEXT.format(title=title, text=text) for title, text in contexts)

    spans: list[Span] = []
    asked = texts.PLAIN_ANSWER
    for message in said:
        if message.role == "user":
            form = texts.PLAIN_ASK_WITH_INPUT if message.input else texts.PLAIN_ASK
            asked = form.format(ask=message.text, input=message.input)
        else:
            spans += [Span(prompt + asked, False), *message.spans, Span(end, message.supervised)]
            prompt, asked = "\n\n", texts.PLAIN_ANSWER
    return join([*spans, Span(prompt + asked, False)] if open_end else spans)
