"""Write dialogues as gdGPT does, for models that it trained or that have to be asked in its prompts.

The texts, and what of them is trained, are those of its `datasets.py` (github.com/CoinCheung/gdGPT).
It tokenizes the header, each question, the heading of each answer and each answer one by one, and writes one more end
of sequence behind the last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from data import prompt_texts as texts
from data.chat.messages import JSON, Dialogue, Said, as_text, each_said_in, with_mask
from data.chat.prompts import Mask
from data.chat.rendered import RenderedText, Span, join
from data.errors import DataError
from data.records.chat import Chat, Unanswered
from data.records.record import ApiAnswer

NO_PLACE = "prompt_format: gdgpt has no place for {}; expected none, or another prompt_format"


def write_gdgpt(record: Dialogue, end: str, mask: Mask) -> RenderedText:
    """Write a record in the pieces that are tokenized one by one.

    Args:
        end: the end of sequence.

    Raises:
        DataError: gdGPT's texts have no place for something in it.
    """
    said = with_mask(each_said_in(record), mask)
    pieces = _pieces(said, record.tools if isinstance(record, Chat) else [], end)
    if not isinstance(record, Unanswered):
        pieces.append(Span(end, [each.supervised for each in said if each.role == "assistant"][-1]))
    pieces = [Span(piece.text, piece.supervised or mask == "all") for piece in pieces]
    return join(pieces)._replace(pieces=tuple(pieces))


def ask_gdgpt(said: Sequence[Said], tools: list[JSON], end: str) -> RenderedText:
    """Write the prompt for the answer to the last message.

    Raises:
        DataError: see `write_gdgpt`.
    """
    # A model writes the white space before the end of its answer, which the text has by itself.
    said = [each._replace(text=each.text.rstrip()) if each.role == "assistant" else each for each in said]
    pieces = _pieces([*said, Said("assistant", "")], tools, end)[:-1]  # without the answer itself
    return join(pieces)._replace(pieces=tuple(pieces))


def _pieces(said: Sequence[Said], tools: list[JSON], end: str) -> list[Span]:
    contexts = {each.name: each for each in said if each.role == "context"}
    refused = {
        "a system message": any(each.role == "system" for each in said),
        "calls and results in messages": any(each.calls or each.role == "tool" for each in said),
        "thoughts in messages": any(each.reasoning for each in said),
        "an input beside other messages": len(said) > 2 and any(each.input is not None for each in said),
        "tools beside a reference or an input": tools and (contexts or said[0].input is not None),
    }
    for what in (what for what, there in refused.items() if there):
        raise DataError(NO_PLACE.format(what))

    if said[0].input is not None:
        asked, answered = said
        form = texts.PLAIN_ASK_WITH_INPUT if said[0].input.strip() else texts.PLAIN_ASK
        question = texts.PLAIN_HEADER_WITH_INPUT + form.format(ask=asked.text, input=asked.input)  # even without one
        return [Span(question, False), Span(texts.GDGPT_OUTPUT.format(ans=answered.text, end=end), answered.supervised)]

    asks, answers, header = "Human", "Assistent", texts.GDGPT_CHAT
    if reference := contexts.get(texts.REFERENCE_TITLE):
        asks, answers, header = "Instruction", "Response", texts.GDGPT_REFERENCE.format(reference=reference.text)
    elif tools or contexts:
        description = tools or contexts[texts.API_TITLE].source  # a text is in quotes, like any JSON
        header = texts.GDGPT_TOOLS.format(description=json.dumps(description, indent=2, ensure_ascii=False))

    heading = Span(texts.GDGPT_HEADING.format(name=answers), False)
    pieces = [Span(header, False)]
    for each in said:
        if each.role == "user":
            pieces.append(Span(texts.GDGPT_ASK.format(name=asks, ask=each.text), False))
        if each.role != "assistant":
            continue
        answer = texts.GDGPT_ANSWER.format(ans=each.text, end=end)
        if isinstance(each.source, ApiAnswer):
            answer = texts.GDGPT_FINAL.format(ans=each.source.ans, end=end)
            for action in each.source.actions:
                given = ", ".join(f"{name}={value!r}" for name, value in action.api_param.items())  # as Python
                call = f"{action.api_name}({given})".strip()
                call = texts.GDGPT_CALL.format(thought=action.inner_thought, call=call, end=end)
                result = texts.GDGPT_RESULT.format(result=as_text(action.api_res, indent=2))
                pieces += [heading, Span(call, each.supervised), Span(result, False)]
        pieces += [heading, Span(answer, each.supervised)]
    return pieces
