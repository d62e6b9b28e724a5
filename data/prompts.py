"""Every prompt text, the choice of a format, and the plain format.

A record is first made a `Dialogue`: turns of one user's words and one answer. A dialogue is then written in one of two
ways: by a chat template (`data.chats.chat_template`), the tokenizer's own or one from a file, or in the plain format
below (the well-known instruction prompt). demo.py asks through the same functions, so that a model is asked exactly as
it was trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from data.errors import DataError
from data.files.paths import read_small
from data.records import ApiAnswer, ConverHasApi, Conversation, Instruct, RefQA

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_TEMPLATE, PLAIN = "chat_template", "plain"

PLAIN_HEADER = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
PLAIN_HEADER_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)
PLAIN_CONTEXT = "### {title}:\n{text}\n\n"
PLAIN_ANSWER = "### Response:\n"
PLAIN_ASK = "### Instruction:\n{ask}\n\n" + PLAIN_ANSWER
PLAIN_ASK_WITH_INPUT = "### Instruction:\n{ask}\n\n### Input:\n{input}\n\n" + PLAIN_ANSWER

CHAT_CONTEXT = "{title}:\n{text}\n\n"
CHAT_INPUT = "{ask}\n\n{input}"

REFERENCE_TITLE = "Reference"
SYSTEM_TITLE = "System"
API_TITLE = "APIs"
API_THOUGHT = "Thought: {thought}\n"
API_CALL = "Action: {name}\nAction Input: {param}\nObservation:"
API_RESULT = " {result}\n"
API_FINAL = "Final Answer: {ans}"
THINKING = "<think>\n{thought}\n</think>\n\n"  # where a template knows no thoughts, they are part of the answer


class Span(NamedTuple):
    """A piece of text; `supervised` pieces bear loss."""

    text: str
    supervised: bool


class Written(NamedTuple):
    """A whole sample as text.

    Attributes:
        loss: the ranges of characters [begin, end) that bear loss, in order, none empty, none touching the next.
    """

    text: str
    loss: list[tuple[int, int]]


@dataclass(frozen=True)
class Turn:
    """What the user says and what the model is to answer; an empty answer is still to be given.

    Attributes:
        ends: the end of the turn bears loss.
    """

    ask: str
    answer: tuple[Span, ...] = ()
    input: str | None = None
    ends: bool = True


@dataclass(frozen=True)
class Dialogue:
    """A record of any kind but pretrain, ready to be written.

    Attributes:
        turns: in order.
        contexts: title and text of what the answers may rest on, put before the first question.
    """

    turns: tuple[Turn, ...]
    contexts: tuple[tuple[str, str], ...] = ()


def check_prompt_format(value: str) -> str:
    """Give `value` back if it is chat_template, plain, or the path of a Jinja file that can be used as a chat template.

    Raises:
        DataError: it is none of them, the file is missing or no text, or its template is damaged.
    """
    if value not in (CHAT_TEMPLATE, PLAIN):
        template_in_file(value)
    return value


def template_in_file(path: str) -> str:
    """The text of a user's chat template. It runs in the sandbox that transformers runs templates in.

    Raises:
        DataError: see `check_prompt_format`.
    """
    try:
        text = read_small(path).decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        if not Path(path).suffix:  # a word, not a path
            raise DataError(f"{path}: expected 'chat_template' or 'plain', or the path of a Jinja file") from None
        raise DataError(f"{path}: not found; expected a Jinja file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start}: not UTF-8; expected a Jinja file in UTF-8") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; expected a Jinja file") from None
    from jinja2 import TemplateSyntaxError  # with transformers, which a config that names no file does without

    from data.chats.sandbox import SlowTemplate, render

    try:
        render(text, messages=[{"role": "user", "content": "?"}])
    except SlowTemplate as error:
        raise DataError(f"{path}: {error}; expected one that comes to its end") from None
    except TemplateSyntaxError as error:
        raise DataError(f"{path}: line {error.lineno}: {error.message}; expected a Jinja template") from None
    except Exception:  # the template refuses these words; whether it takes the records is another question
        return text
    return text


def _validate(value: str) -> str:
    try:
        return check_prompt_format(value)
    except DataError as error:
        raise PydanticCustomError(
            "prompt_format", "{reason}", {"reason": str(error).removeprefix(f"{value}: ")}
        ) from None


# chat_template, plain, or the path of a Jinja file; pydantic checks it.
PromptFormat = Annotated[str, AfterValidator(_validate)]


def default_format(tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
    """The tokenizer's own chat template when it ships one, else plain."""
    return CHAT_TEMPLATE if tokenizer.chat_template else PLAIN


def as_dialogue(record: Instruct | Conversation | ConverHasApi | RefQA) -> Dialogue:
    """The turns of a record. Asks that follow each other become one question, answers one answer.

    The first answer may come without a question.
    """
    if isinstance(record, Instruct):
        return Dialogue((Turn(record.instruct, (Span(record.output, True),), record.input or None),))
    contexts: tuple[tuple[str, str], ...] = ()
    if isinstance(record, RefQA):
        contexts = ((REFERENCE_TITLE, record.reference),)
    elif isinstance(record, ConverHasApi):
        contexts = ((API_TITLE, record.api_desc),)
    turns: list[Turn] = []
    asks: list[str] = []
    for role, content in record.rounds:
        if role == "ask":
            asks.append(str(content))
            continue
        answer = _api_spans(content) if isinstance(content, ApiAnswer) else (Span(content, True),)
        if asks or not turns:
            turns.append(Turn("\n".join(asks), answer))
            asks = []
        else:
            turns[-1] = Turn(turns[-1].ask, (*turns[-1].answer, Span("\n", True), *answer))
    return Dialogue(tuple(turns), contexts)


def _api_spans(answer: ApiAnswer) -> tuple[Span, ...]:
    spans = []
    for action in answer.actions:
        param = json.dumps(action.api_param, ensure_ascii=False)
        call = API_THOUGHT.format(thought=action.inner_thought) + API_CALL.format(name=action.api_name, param=param)
        result = action.api_res
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        spans += [Span(call, True), Span(API_RESULT.format(result=text), False)]
    return (*spans, Span(API_FINAL.format(ans=answer.ans), True))


def end_of_sequence(token: str | None) -> str:
    """The tokenizer's eos_token, which has to be there.

    Raises:
        DataError: it is not.
    """
    if not token:
        raise DataError("the tokenizer has no eos_token; expected one in tokenizer_config.json")
    return token


def write_plain(dialogue: Dialogue, end: str, open_end: bool = False) -> Written:
    """A dialogue in the plain format, each answer followed by the end of sequence; the last without if `open_end`."""
    prompt = PLAIN_HEADER_WITH_INPUT if dialogue.turns[0].input else PLAIN_HEADER
    for title, text in dialogue.contexts:
        prompt += PLAIN_CONTEXT.format(title=title, text=text)
    spans: list[Span] = []
    for turn in dialogue.turns:
        if turn.input:
            prompt += PLAIN_ASK_WITH_INPUT.format(ask=turn.ask, input=turn.input)
        else:
            prompt += PLAIN_ASK.format(ask=turn.ask) if turn.ask else PLAIN_ANSWER
        spans += [Span(prompt, False), *turn.answer, Span(end, turn.ends)]
        prompt = "\n\n"
    return join(spans[:-1] if open_end else spans)


def join(spans: list[Span]) -> Written:
    """Pieces of text put together."""
    loss: list[tuple[int, int]] = []
    place = 0
    for text, supervised in spans:
        begin, place = place, place + len(text)
        if supervised and text:
            if loss and loss[-1][1] == begin:
                begin = loss.pop()[0]
            loss.append((begin, place))
    return Written("".join(span.text for span in spans), loss)
