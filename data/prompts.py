"""Every prompt text, and how a record becomes pieces of text with and without loss.

A record is first made a `Dialogue`: turns of one user's words and one answer. A dialogue is then written in one of two
formats: the tokenizer's own chat template, or the plain format below (the well-known instruction prompt). demo.py asks
through the same functions, so that a model is asked exactly as it was trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from data.errors import DataError
from data.records import ApiAnswer, ConverHasApi, Conversation, Instruct, Pretrain, Record, RefQA

PromptFormat = Literal["chat_template", "plain"]

PLAIN_HEADER = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
PLAIN_HEADER_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)
PLAIN_CONTEXT = "### {title}:\n{text}\n\n"
PLAIN_ASK = "### Instruction:\n{ask}\n\n### Response:\n"
PLAIN_ASK_WITH_INPUT = "### Instruction:\n{ask}\n\n### Input:\n{input}\n\n### Response:\n"

CHAT_CONTEXT = "{title}:\n{text}\n\n"
CHAT_INPUT = "{ask}\n\n{input}"

REFERENCE_TITLE = "Reference"
API_TITLE = "APIs"
API_CALL = "Thought: {thought}\nAction: {name}\nAction Input: {param}\nObservation:"
API_RESULT = " {result}\n"
API_FINAL = "Final Answer: {ans}"


class Span(NamedTuple):
    """A piece of text; `supervised` pieces bear loss."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Turn:
    """What the user says and what the model is to answer; an empty answer is still to be given."""

    ask: str
    answer: tuple[Span, ...] = ()
    input: str | None = None


@dataclass(frozen=True)
class Dialogue:
    """A record of any kind but pretrain, ready to be written.

    Attributes:
        turns: in order.
        context: title and text of what the answers may rest on, put before the first question.
    """

    turns: tuple[Turn, ...]
    context: tuple[str, str] | None = None


def default_format(tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
    """The tokenizer's own chat template when it ships one, else plain."""
    return "chat_template" if tokenizer.chat_template else "plain"


def write(record: Record, tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat) -> list[Span]:
    """The whole text of a record, in pieces with and without loss, end-of-sequence included.

    Raises:
        DataError: the format cannot hold the record (no chat template, a template that refuses or rewrites it).
    """
    if isinstance(record, Pretrain):
        return [Span(record.text, True), Span(_end_of_sequence(tokenizer), True)]
    dialogue = as_dialogue(record)
    if prompt_format == "plain":
        return _write_plain(dialogue, tokenizer)
    return _write_chat(dialogue, tokenizer)


def write_question(dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat) -> str:
    """The text up to where the answer to the last turn begins: what a model is asked with."""
    if prompt_format == "plain":
        return "".join(span.text for span in _write_plain(dialogue, tokenizer, open_end=True))
    text: str = _render(tokenizer, _messages(dialogue)[:-1], add_generation_prompt=True)
    return text


def as_dialogue(record: Instruct | Conversation | ConverHasApi | RefQA) -> Dialogue:
    """The turns of a record. Asks that follow each other become one question, answers one answer."""
    if isinstance(record, Instruct):
        return Dialogue((Turn(record.instruct, (Span(record.output, True),), record.input or None),))
    context = None
    if isinstance(record, RefQA):
        context = (REFERENCE_TITLE, record.reference)
    elif isinstance(record, ConverHasApi):
        context = (API_TITLE, record.api_desc)
    turns: list[Turn] = []
    asks: list[str] = []
    for role, content in record.rounds:
        if role == "ask":
            asks.append(str(content))
            continue
        answer = _api_spans(content) if isinstance(content, ApiAnswer) else (Span(content, True),)
        if asks:
            turns.append(Turn("\n".join(asks), answer))
            asks = []
        else:
            turns[-1] = Turn(turns[-1].ask, (*turns[-1].answer, Span("\n", True), *answer))
    return Dialogue(tuple(turns), context)


def _api_spans(answer: ApiAnswer) -> tuple[Span, ...]:
    spans = []
    for action in answer.actions:
        param = json.dumps(action.api_param, ensure_ascii=False)
        call = API_CALL.format(thought=action.inner_thought, name=action.api_name, param=param)
        result = action.api_res
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        spans += [Span(call, True), Span(API_RESULT.format(result=text), False)]
    return (*spans, Span(API_FINAL.format(ans=answer.ans), True))


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.eos_token:
        raise DataError("the tokenizer has no eos_token; expected one in tokenizer_config.json")
    return str(tokenizer.eos_token)


def _write_plain(dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase, open_end: bool = False) -> list[Span]:
    end = _end_of_sequence(tokenizer)
    prompt = PLAIN_HEADER_WITH_INPUT if dialogue.turns[0].input else PLAIN_HEADER
    if dialogue.context:
        title, text = dialogue.context
        prompt += PLAIN_CONTEXT.format(title=title, text=text)
    spans: list[Span] = []
    for turn in dialogue.turns:
        if turn.input:
            prompt += PLAIN_ASK_WITH_INPUT.format(ask=turn.ask, input=turn.input)
        else:
            prompt += PLAIN_ASK.format(ask=turn.ask)
        spans += [Span(prompt, False), *turn.answer, Span(end, True)]
        prompt = "\n\n"
    return spans[:-1] if open_end else spans


def _messages(dialogue: Dialogue) -> list[dict[str, str]]:
    messages = []
    for number, turn in enumerate(dialogue.turns):
        ask = CHAT_INPUT.format(ask=turn.ask, input=turn.input) if turn.input else turn.ask
        if number == 0 and dialogue.context:
            title, text = dialogue.context
            ask = CHAT_CONTEXT.format(title=title, text=text) + ask
        answer = "".join(span.text for span in turn.answer)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return messages


def _write_chat(dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Find the answers in the rendered text by rendering once more with a mark in the place of each.

    What the template writes between the marks is scaffolding and bears no loss, but for two pieces that the model has
    to produce itself: what follows the generation prompt (an empty thinking block, say) and the end-of-turn token.
    """
    messages = _messages(dialogue)
    rendered = _render(tokenizer, messages)
    marked = [dict(message) for message in messages]
    for number, message in enumerate(marked[1::2]):
        message["content"] = _mark(number)
    scaffold = _render(tokenizer, marked)
    prompts = [
        _render(tokenizer, marked[: 2 * turn + 1], add_generation_prompt=True) for turn in range(len(dialogue.turns))
    ]
    for answers in ([turn.answer for turn in dialogue.turns], [_stripped(turn.answer) for turn in dialogue.turns]):
        filled = scaffold
        for number, answer in enumerate(answers):
            filled = filled.replace(_mark(number), "".join(span.text for span in answer))
        if filled == rendered and all(scaffold.count(_mark(turn)) == 1 for turn in range(len(answers))):
            return _fill(scaffold, answers, prompts, tokenizer)
    raise DataError("the chat template changes the words of an answer; use prompt_format: plain")


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"  # private-use characters: no template looks for them


def _fill(
    scaffold: str, answers: list[tuple[Span, ...]], prompts: list[str], tokenizer: PreTrainedTokenizerBase
) -> list[Span]:
    """The scaffold with the answers in the place of their marks.

    The model writes all that stands between what it is asked with and its answer, and the end of its turn.
    """
    spans: list[Span] = []
    done, rest = "", scaffold
    for number, answer in enumerate(answers):
        before, mark, rest = rest.partition(_mark(number))
        prompt = prompts[number]
        begin = len(prompt) - len(done) if (done + before).startswith(prompt) else len(before)
        end = _end_of_turn(rest, tokenizer)
        spans += [Span(before[:begin], False), Span(before[begin:], True), *answer]
        if not end and number == len(answers) - 1:
            spans.append(Span(_end_of_sequence(tokenizer), True))
        spans.append(Span(rest[:end], True))
        done += before + mark + rest[:end]
        rest = rest[end:]
    spans.append(Span(rest, False))
    return [span for span in spans if span.text]


def _end_of_turn(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Length of the special token that `text` begins with, blanks before it included; 0 where there is none."""
    token = text.lstrip(" ")
    blanks = len(text) - len(token)
    for known in (tokenizer.all_special_tokens, tokenizer.get_added_vocab()):
        if lengths := [len(special) for special in known if token.startswith(special)]:
            return blanks + max(lengths)
    return 0


def _stripped(answer: tuple[Span, ...]) -> tuple[Span, ...]:
    """An answer without white space around it, as some templates write it."""
    spans = list(answer)
    spans[0] = Span(spans[0].text.lstrip(), spans[0].supervised)
    spans[-1] = Span(spans[-1].text.rstrip(), spans[-1].supervised)
    return tuple(spans)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **options: Any) -> str:
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template; use prompt_format: plain")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # a template may raise anything
        raise DataError(f"the chat template refuses the record: {' '.join(str(error).split())}") from None
