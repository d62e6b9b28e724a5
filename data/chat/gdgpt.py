"""Write dialogues as gdGPT does, for models that it trained or that have to be asked in its prompts.

The texts, and what of them is trained, are those of its `datasets.py` (github.com/CoinCheung/gdGPT). It tokenizes the
header, each question, the heading of each answer and each answer one by one, and ends with one more end of sequence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from data import prompt_texts as texts
from data.chat.messages import JSON, Said, as_text
from data.chat.rendered import RenderedText, Span, join
from data.errors import DataError
from data.records.record import ApiAnswer

NO_PLACE = "prompt_format: gdgpt has no place for {}; expected none, or another prompt_format"


def write_gdgpt(said: Sequence[Said], tools: list[JSON], end: str, open_end: bool = False) -> RenderedText:
    """Write a dialogue in the pieces that are tokenized one by one.

    Args:
        said: as `data.chat.messages.each_said_in` makes it.
        end: the end of sequence.
        open_end: the text ends where the answer to the last message begins.

    Raises:
        DataError: gdGPT's texts have no place for something in it.
    """
    contexts = {message.name: message for message in said if message.role == "context"}
    instructed = any(message.input is not None for message in said)
    refused = {
        "a system message": any(message.role == "system" for message in said),
        "calls and results in messages": any(message.calls or message.role == "tool" for message in said),
        "thoughts in messages": any(message.reasoning for message in said),
        "an input beside other messages": instructed and len(said) > 2 - open_end,
        "tools beside a reference or an input": tools and (contexts or instructed),
    }
    if unfit := [what for what, there in refused.items() if there]:
        raise DataError(NO_PLACE.format(unfit[0]))

    asks, answers, header = "Human", "Assistent", texts.GDGPT_CHAT
    if reference := contexts.get(texts.REFERENCE_TITLE):
        asks, answers, header = "Instruction", "Response", texts.GDGPT_REFERENCE.format(reference=reference.text)
    elif tools or contexts:
        description = tools or contexts[texts.API_TITLE].source  # a text is in quotes, like any JSON
        header = texts.GDGPT_TOOLS.format(description=json.dumps(description, indent=2, ensure_ascii=False))
    pieces = [] if instructed else [Span(header, False)]
    heading = [] if instructed else [Span(texts.GDGPT_HEADING.format(name=answers), False)]

    for message in said:
        if message.role == "user" and message.input is not None:  # its header speaks of an input even without one
            form = texts.PLAIN_ASK_WITH_INPUT if message.input.strip() else texts.PLAIN_ASK
            asked = texts.PLAIN_HEADER_WITH_INPUT + form.format(ask=message.text, input=message.input)
            pieces.append(Span(asked, False))
        elif message.role == "user":
            pieces.append(Span(texts.GDGPT_ASK.format(name=asks, ask=message.text), False))
        elif isinstance(message.source, ApiAnswer):
            for action in message.source.actions:
                given = ", ".join(f"{name}={value!r}" for name, value in action.api_param.items())  # as Python
                call = f"{action.api_name}({given})".strip()
                call = texts.GDGPT_CALL.format(thought=action.inner_thought, call=call, end=end)
                result = texts.GDGPT_RESULT.format(result=as_text(action.api_res, indent=2))
                pieces += [*heading, Span(call, message.supervised), Span(result, False)]
            pieces += [*heading, Span(texts.GDGPT_FINAL.format(ans=message.source.ans, end=end), message.supervised)]
        elif message.role == "assistant":
            form = texts.GDGPT_OUTPUT if instructed else texts.GDGPT_ANSWER
            # A model that is asked again has written the blank behind its answer, which the text has by itself.
            answer = form.format(ans=message.text.rstrip() if open_end else message.text, end=end)
            pieces += [*heading, Span(answer, message.supervised)]

    trained = [message.supervised for message in said if message.role == "assistant"][-1:]
    pieces += heading if open_end else [Span(end, *trained)]
    return join(pieces)._replace(pieces=tuple(piece.text for piece in pieces))
