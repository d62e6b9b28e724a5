"""The layouts that records are published in, and the records that each becomes.

A layout is a pydantic model of one object. Its required fields tell it from the others (`data.files.formats`); fields
that it does not know are left alone. Where one object holds several samples (all questions on an article, all instances
of an instruction) it becomes several records.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, PrivateAttr, field_validator, model_validator
from pydantic_core import from_json

from data.chats.chat import Chat, Function, Message, ToolCall
from data.records import Instruct, Pretrain, Record, RefQA, shown


class Layout(BaseModel):
    """One record as somebody else writes it."""

    def records(self) -> list[Record]:
        """The same content as Pipetune's records."""
        raise NotImplementedError


class OpenAI(Layout):
    """`messages` of the OpenAI chat API, with `tools` (or the older `functions`) and calls of them."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    tools: Any = Field(None, validation_alias=AliasChoices("tools", "functions"))

    def records(self) -> list[Record]:
        return [Chat(messages=self.messages, tools=self.tools)]


SHAREGPT_ROLES = {
    **dict.fromkeys(["human", "user"], "user"),
    **dict.fromkeys(["gpt", "assistant", "chatgpt", "function_call", "tool_call"], "assistant"),
    **dict.fromkeys(["observation", "tool", "function_response"], "tool"),
    "system": "system",
}


class ShareGPTTurn(BaseModel):
    """Who says what; a function_call says a JSON object with name and arguments, or a list of them."""

    sender: str = Field(validation_alias=AliasChoices("from", "role"))
    value: str = Field(validation_alias=AliasChoices("value", "content"))
    _calls: list[ToolCall] = PrivateAttr(default=[])

    @field_validator("sender", mode="after")
    @classmethod
    def _known(cls, sender: str) -> str:
        if sender not in SHAREGPT_ROLES:
            raise ValueError(f"expected one of {', '.join(SHAREGPT_ROLES)}, found {shown(sender)}")
        return sender

    @field_validator("value", mode="before")
    @classmethod
    def _write(cls, value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value

    @model_validator(mode="after")
    def _parse_calls(self) -> ShareGPTTurn:
        if self.sender in ("function_call", "tool_call"):
            try:
                calls = from_json(self.value, allow_inf_nan=False)
                calls = calls if isinstance(calls, list) else [calls]
                self._calls = [ToolCall(function=Function.model_validate(call)) for call in calls]
            except ValueError:
                raise ValueError(
                    f"the {self.sender} is not JSON with name and arguments; expected an object or a list of them"
                ) from None
        return self

    def message(self) -> Message:
        """The same in the form of chat APIs."""
        content = "" if self._calls else self.value
        return Message.model_validate(
            {"role": SHAREGPT_ROLES[self.sender], "content": content, "tool_calls": self._calls}
        )


class ShareGPT(Layout):
    """`conversations` of `{from, value}`; `system` and `tools` may stand beside them."""

    conversations: list[ShareGPTTurn] = Field(min_length=1, fail_fast=True)
    system: str | None = None
    tools: Any = None

    @field_validator("conversations", mode="after")
    @classmethod
    def _answered(cls, turns: list[ShareGPTTurn]) -> list[ShareGPTTurn]:
        if not any(SHAREGPT_ROLES[turn.sender] == "assistant" for turn in turns):
            raise ValueError("expected at least one of gpt, found none")
        return turns

    def records(self) -> list[Record]:
        messages = [turn.message() for turn in self.conversations]
        return [Chat(messages=_system(self.system) + messages, tools=self.tools)]


class SquadAnswer(BaseModel):
    text: str


class SquadQuestion(BaseModel):
    question: str = Field(min_length=1)
    answers: list[SquadAnswer] = Field(fail_fast=True)

    @field_validator("answers", mode="before")
    @classmethod
    def _from_columns(cls, answers: Any) -> Any:
        """A table holds one list of texts where the original file has a list of answers."""
        if isinstance(answers, dict) and isinstance(answers.get("text"), list):
            return [{"text": text} for text in answers["text"]]
        return answers

    def rounds(self) -> list[tuple[str, str]]:
        """The question and its first answer; an empty one where the text has none (SQuAD 2)."""
        return [("ask", self.question), ("ans", self.answers[0].text if self.answers else "")]


class SquadParagraph(BaseModel):
    context: str
    qas: list[SquadQuestion] = Field(min_length=1, fail_fast=True)

    def record(self) -> Record:
        """All questions on the paragraph, one after the other."""
        rounds = [entry for question in self.qas for entry in question.rounds()]
        return RefQA.model_validate({"type": "ref_qa", "reference": self.context, "rounds": rounds})


class SquadArticle(Layout):
    """An article of SQuAD's own files: `paragraphs` of `context` and `qas`; each paragraph becomes a record."""

    paragraphs: list[SquadParagraph] = Field(min_length=1, fail_fast=True)

    def records(self) -> list[Record]:
        return [paragraph.record() for paragraph in self.paragraphs]


class SquadRow(Layout, SquadQuestion):
    """SQuAD as a table: `context`, `question` and `answers` in each row."""

    context: str

    def records(self) -> list[Record]:
        rounds = self.rounds()
        return [RefQA.model_validate({"type": "ref_qa", "reference": self.context, "rounds": rounds})]


class SelfInstructInstance(BaseModel):
    input: str | None = None
    output: str


class SelfInstruct(Layout):
    """Seed tasks of Self-Instruct and BELLE: one `instruction`, several `instances` of input and output."""

    instruction: str = Field(min_length=1)
    instances: list[SelfInstructInstance] = Field(min_length=1, fail_fast=True)

    def records(self) -> list[Record]:
        return [_instruct(self.instruction, instance.input, instance.output) for instance in self.instances]


class Alpaca(Layout):
    """`instruction`, `input`, `output`; also Dolly's `context` and `response`.

    With a `system` text or a `history` of earlier pairs of question and answer it is a chat.
    """

    instruction: str
    input: str | None = Field(None, validation_alias=AliasChoices("input", "context"))
    output: str = Field(validation_alias=AliasChoices("output", "response"))
    system: str | None = None
    history: list[tuple[str, str]] | None = Field(None, fail_fast=True)

    @model_validator(mode="after")
    def _asked(self) -> Alpaca:
        if not self.instruction and not self.input:
            raise ValueError("instruction: expected a question here or in input, found both empty")
        return self

    def records(self) -> list[Record]:
        if not self.system and not self.history:
            ask, more = (self.instruction, self.input) if self.instruction else (self.input or "", None)
            return [_instruct(ask, more, self.output)]
        from data.prompts import CHAT_INPUT  # brings transformers along, which a reader of configs can do without

        ask = CHAT_INPUT.format(ask=self.instruction, input=self.input) if self.input else self.instruction
        pairs = [*(self.history or []), (ask, self.output)]
        roles = ("user", "assistant")
        turns = [_message(role, text) for pair in pairs for role, text in zip(roles, pair, strict=True)]
        return [Chat(messages=_system(self.system) + turns)]


class PromptCompletion(Layout):
    """`prompt` and `completion` (or `response`), each a text or a list of messages; loss on the completion alone."""

    prompt: list[Message] = Field(min_length=1, fail_fast=True)
    completion: list[Message] = Field(
        min_length=1, fail_fast=True, validation_alias=AliasChoices("completion", "response")
    )
    tools: Any = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _ask(cls, prompt: Any) -> Any:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    @field_validator("completion", mode="before")
    @classmethod
    def _answer(cls, completion: Any) -> Any:
        return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion

    def records(self) -> list[Record]:
        asked = [message.model_copy(update={"weight": 0}) for message in self.prompt]
        chat = Chat(messages=asked + self.completion, tools=self.tools)
        plain = [(message.role, bool(message.tool_calls)) for message in chat.messages]
        if plain == [("user", False), ("assistant", False)] and not chat.tools:
            return [_instruct(self.prompt[0].content, None, self.completion[0].content)]
        return [chat]


class QuestionAnswer(Layout):
    """`question` (or `query`) and `answer` (or `response`), as in GSM8K; with a `system_prompt` it is a chat."""

    question: str = Field(min_length=1, validation_alias=AliasChoices("question", "query"))
    answer: str = Field(validation_alias=AliasChoices("answer", "response"))
    system: str | None = Field(None, validation_alias=AliasChoices("system", "system_prompt"))

    def records(self) -> list[Record]:
        if not self.system:
            return [_instruct(self.question, None, self.answer)]
        turns = [_message("user", self.question), _message("assistant", self.answer)]
        return [Chat(messages=_system(self.system) + turns)]


class Text(Layout):
    """`text` to continue training on."""

    text: str = Field(min_length=1)

    def records(self) -> list[Record]:
        return [Pretrain(type="pretrain", text=self.text)]


def _message(role: str, content: str) -> Message:
    return Message.model_validate({"role": role, "content": content})


def _system(text: str | None) -> list[Message]:
    return [_message("system", text)] if text else []


def _instruct(ask: str, more: str | None, answer: str) -> Instruct:
    return Instruct.model_validate({"type": "instruct", "instruct": ask, "input": more or None, "output": answer})
