"""Define the layouts of published data sets and convert each to records.

A layout is a pydantic model of one object. Its required fields tell it from the others (`data.records.formats`);
`data.records.fields` judges the fields it does not know. Where one object holds several samples (all questions on an
article, all instances of an instruction) it becomes several records.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from data.images.image import Image
from data.prompt_texts import CHAT_CONTEXT, CHAT_INPUT, REFERENCE_TITLE
from data.records.chat import Chat, Message, split_parts
from data.records.fields import from_text
from data.records.record import Instruct, Pretrain, Record, RefQA, Segments, Tokenized, json_type
from data.sample_set import IGNORED


def _joined(system: Any) -> Any:
    """Join Bedrock's list of parts like the parts of a message."""
    return _message("system", system).content if isinstance(system, list) else system


def _number_as_text(answer: Any) -> Any:
    return str(answer) if type(answer) is int else answer  # how a fraction is to be written, nobody can tell


AnswerText = Annotated[str, BeforeValidator(_number_as_text)]


class RecordLayout(BaseModel):
    """Hold one record in a published layout."""

    def records(self) -> list[Record]:
        """Return the same content as Pipetune's records."""
        raise NotImplementedError


class Dialogue(RecordLayout):
    """Hold what may come before a dialogue, or beside it."""

    system: Annotated[str, BeforeValidator(_joined)] | None = Field(  # who the model is to be
        None, validation_alias=AliasChoices("system", "system_prompt")
    )
    tools: Any = Field(None, validation_alias=AliasChoices("tools", "functions"))  # what an answer may call
    chat_template_kwargs: Any = None

    def chat(self, messages: list[Message]) -> Chat:
        """Return the whole dialogue."""
        system = [_message("system", self.system)] if self.system else []
        return Chat(messages=system + messages, tools=self.tools, chat_template_kwargs=self.chat_template_kwargs)


class OpenAI(Dialogue):
    """Hold `messages` of the OpenAI chat API, with `tools` (or the older `functions`) and calls of them."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)

    @field_validator("messages", mode="before")
    @classmethod
    def _from_text(cls, messages: Any) -> Any:
        """Read JSON, as a table has it, LIMA's list of texts, and Capybara's list of pairs."""
        is_list = isinstance(messages, str) and messages.lstrip().startswith("[")
        messages = from_text(messages, "a list") if is_list else messages
        if not isinstance(messages, list) or not messages:
            return messages
        if all(isinstance(turn, dict) and turn.keys() == {"input", "output"} for turn in messages):
            messages = list(chain.from_iterable((turn["input"], turn["output"]) for turn in messages))
        elif not all(isinstance(turn, str) for turn in messages):
            return split_parts(messages)
        return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(messages)]

    def records(self) -> list[Record]:
        return [self.chat(self.messages)]


class ShareGPT(OpenAI):
    """Hold `conversations` of `{from, value}`, or of messages."""

    messages: list[Message] = Field(
        min_length=1, fail_fast=True, validation_alias=AliasChoices("conversations", "conversation")
    )


class FunctionCalls(RecordLayout):
    """Hold `query`, `answers` and `tools` of xLAM and APIGen: a question, and the calls that answer it."""

    query: str = Field(min_length=1)
    answers: Any
    tools: Any

    def records(self) -> list[Record]:
        try:
            answer = _message("tool_call", self.answers)
        except ValueError:
            raise ValueError("answers: expected a list of calls with name and arguments, or its JSON") from None
        if not answer.tool_calls:
            raise ValueError("answers: expected at least one call, found none")
        return [Chat(messages=[_message("user", self.query), answer], tools=self.tools)]


class SquadQuestion(BaseModel):
    question: str = Field(min_length=1, validation_alias=AliasChoices("question", "query_text"))
    answers: list[str] = Field(fail_fast=True)  # the first is trained; there is none where the text has none (SQuAD 2)

    @field_validator("answers", mode="before")
    @classmethod
    def _texts(cls, answers: Any) -> Any:
        """Read a list of objects (in a file), an object of lists (in a table), or a list of texts (CMRC)."""
        if isinstance(answers, dict):
            return answers.get("text", answers)
        objects = isinstance(answers, list) and all(isinstance(answer, dict) and "text" in answer for answer in answers)
        return [answer["text"] for answer in answers] if objects else answers

    def rounds(self) -> list[tuple[str, str]]:
        """Return the question and its answer."""
        return [("ask", self.question), ("ans", self.answers[0] if self.answers else "")]


class SquadParagraph(RecordLayout):
    """Hold a paragraph and its questions, as CMRC writes them too; they become one record."""

    context: str = Field(validation_alias=AliasChoices("context", "context_text"))
    qas: list[SquadQuestion] = Field(min_length=1, fail_fast=True)

    def records(self) -> list[Record]:
        return [_ref_qa(self.context, list(chain.from_iterable(question.rounds() for question in self.qas)))]


class SquadArticle(RecordLayout):
    """Hold an article of SQuAD's own files: `paragraphs` of `context` and `qas`; each paragraph becomes a record."""

    paragraphs: list[SquadParagraph] = Field(min_length=1, fail_fast=True)

    def records(self) -> list[Record]:
        return list(chain.from_iterable(paragraph.records() for paragraph in self.paragraphs))


class SquadRow(RecordLayout, SquadQuestion):
    """Hold SQuAD as a table: `context`, `question` and `answers` in each row."""

    context: str

    def records(self) -> list[Record]:
        return [_ref_qa(self.context, self.rounds())]


class SelfInstructInstance(BaseModel):
    input: str | None = None
    output: str


class SelfInstruct(RecordLayout):
    """Hold seed tasks of Self-Instruct and BELLE: one `instruction`, several `instances` of input and output."""

    instruction: str = Field(min_length=1)
    instances: list[SelfInstructInstance] = Field(min_length=1, fail_fast=True)

    def records(self) -> list[Record]:
        return [_instruct(self.instruction, instance.input, instance.output) for instance in self.instances]


class Asked(Dialogue):
    """Hold one question and its answer, and what may come before them."""

    history: list[tuple[str, str]] | None = Field(None, fail_fast=True)  # earlier pairs of question and answer
    reasoning: str | None = Field(  # what was thought before the answer
        None, validation_alias=AliasChoices("reasoning_content", "reasoning", "thinking", "thought", "cot")
    )

    @field_validator("reasoning")
    @classmethod
    def _no_switch(cls, reasoning: str | None) -> str | None:
        if reasoning in ("on", "off"):
            raise ValueError(f"expected the thoughts of the answer, found {reasoning!r}")
        return reasoning

    def record(self, ask: str, more: str | None, answer: str) -> Record:
        """Return the question and its answer: an instruction where nothing comes before them."""
        if not (self.system or self.history or self.tools or self.reasoning or self.chat_template_kwargs):
            return _instruct(ask, more, answer)
        ask = CHAT_INPUT.format(ask=ask, input=more) if more else ask
        return self.after_history([_message("user", ask), _message("assistant", answer)])

    def after_history(self, messages: list[Message]) -> Chat:
        """Return the dialogue that ends with these messages."""
        if self.reasoning:
            messages[-1].reasoning_content = self.reasoning
        before = []
        for question, answer in self.history or []:
            before += [_message("user", question), _message("assistant", answer)]
        return self.chat(before + messages)


class Alpaca(Asked):
    """Hold `instruction`, `input`, `output`; also Dolly's `context` and `response`."""

    instruction: str
    input: str | None = Field(None, validation_alias=AliasChoices("input", "context"))
    output: AnswerText = Field(validation_alias=AliasChoices("output", "response"))

    def records(self) -> list[Record]:
        if not self.instruction and not self.input:
            raise ValueError("instruction: expected a question here or in input, found both empty")
        ask, more = (self.instruction, self.input) if self.instruction else (self.input or "", None)
        return [self.record(ask, more, self.output)]


class PromptCompletion(Asked):
    """Hold `prompt` and `completion` (or `response`), texts or messages; only the completion is trained."""

    prompt: list[Message] = Field(min_length=1, fail_fast=True, validation_alias=AliasChoices("prompt", "input"))
    completion: list[Message] = Field(
        min_length=1,
        fail_fast=True,
        validation_alias=AliasChoices("completion", "response", "generation", "output", "target", "content"),
    )

    @field_validator("prompt", "completion", mode="before")
    @classmethod
    def _as_messages(cls, said: Any, info: ValidationInfo) -> Any:
        asked = info.field_name == "prompt"
        said = said if asked else _number_as_text(said)
        if isinstance(said, str):
            return [{"role": "user" if asked else "assistant", "content": said}]
        if not isinstance(said, list):
            raise ValueError(f"expected a text or a list of messages, found {json_type(said)}")
        return said

    def records(self) -> list[Record]:
        both = [*self.prompt, *self.completion]
        words_alone = all(each.model_fields_set <= {"role", "content"} for each in both)
        if words_alone and [each.role for each in both] == ["user", "assistant"]:
            return [self.record(both[0].content, None, both[1].content)]
        asked = [each.model_copy(update={"weight": 0}) for each in self.prompt]
        return [self.after_history(asked + self.completion)]


class QuestionAnswer(Asked):
    """Hold `question` (or `query`) and `answer` (or `response`), as in GSM8K, and maybe a text to answer from."""

    question: str = Field(min_length=1, validation_alias=AliasChoices("question", "query"))
    answer: AnswerText = Field(validation_alias=AliasChoices("answer", "response"))
    context: str | None = Field(
        None, validation_alias=AliasChoices("context", "passage", "article", "document", "reference", "background")
    )

    def records(self) -> list[Record]:
        text = CHAT_CONTEXT.format(title=REFERENCE_TITLE, text=self.context) if self.context else ""
        record = self.record(text + self.question, None, self.answer)
        if self.context and isinstance(record, Instruct):
            return [_ref_qa(self.context, [("ask", self.question), ("ans", self.answer)])]
        return [record]


class ReadySegments(RecordLayout):
    """Hold axolotl's `segments` of `text` and `label`: no template, trained where the label is true."""

    segments: Any

    def records(self) -> list[Record]:
        return [Segments(segments=self.segments)]


class ReadyTokens(RecordLayout):
    """Hold `input_ids` and `labels` (or a mask of the trained ones), already tokenized."""

    input_ids: Any
    labels: Any = None
    attention_mask: Any = None
    loss_mask: list[Literal[0, 1]] | None = Field(
        None,
        fail_fast=True,
        validation_alias=AliasChoices("loss_mask", "completion_mask", "assistant_masks", "assistant_mask"),
    )
    position_ids: list[int] | None = Field(None, fail_fast=True)
    placed_images: tuple[Image, ...] = ()  # each as a sample keeps it, its tokens side by side from `begin` on

    @model_validator(mode="after")
    def _without_padding(self) -> ReadyTokens:
        """Take off what the attention mask hides at either end; a hole is refused later."""
        ids, mask = self.input_ids, self.attention_mask
        if not isinstance(mask, list) or not isinstance(ids, list):
            return self
        if len(mask) != len(ids):
            raise ValueError(f"attention_mask: expected {len(ids)}, one for each of input_ids, found {len(mask)}")
        seen = [place for place, each in enumerate(mask) if each != 0]
        if seen and len(seen) == seen[-1] - seen[0] + 1:
            for name, each in dict(self).items():
                if isinstance(each, list) and len(each) == len(ids):
                    setattr(self, name, each[seen[0] : seen[-1] + 1])
        return self

    def records(self) -> list[Record]:
        if self.position_ids is not None and self.position_ids != list(range(len(self.position_ids))):
            raise ValueError("position_ids: expected one document, counted from 0, as Pipetune packs by itself")
        record = Tokenized(input_ids=self.input_ids, labels=self.labels, attention_mask=self.attention_mask)
        for image in self.placed_images:
            own = record.input_ids[image.begin : image.begin + image.tokens]
            if image.begin < 0 or len(own) != image.tokens or len(set(own)) != 1:
                raise ValueError(f"placed_images: expected {image.tokens} equal ids for an image from {image.begin} on")
        record.images = self.placed_images
        if self.loss_mask is None:
            return [record]
        labels = record.labels or record.input_ids
        if len(self.loss_mask) != len(labels):
            found = f"found {len(self.loss_mask)}"
            raise ValueError(f"loss_mask: expected {len(labels)}, one for each of input_ids, {found}")
        labels = [label if trained else IGNORED for label, trained in zip(labels, self.loss_mask, strict=True)]
        return [record.model_copy(update={"labels": labels})]


class Text(RecordLayout):
    """Hold `text` to continue training on."""

    text: str = Field(min_length=1)
    role: Any = Field(None, validation_alias=AliasChoices("role", "parent_id"))

    def records(self) -> list[Record]:
        if self.role:
            raise ValueError("role: expected whole dialogues, each in one record, found one message of a dialogue")
        return [Pretrain(type="pretrain", text=self.text)]


def _message(role: str, content: Any) -> Message:
    return Message.model_validate({"role": role, "content": content})


def _instruct(ask: str, more: str | None, answer: str) -> Instruct:
    return Instruct(type="instruct", instruct=ask, input=more or None, output=answer)


def _ref_qa(reference: str, rounds: list[tuple[str, str]]) -> RefQA:
    return RefQA.model_validate({"type": "ref_qa", "reference": reference, "rounds": rounds})
