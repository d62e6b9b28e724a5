"""Define Pipetune's five kinds of record and two ready-made ones, checked with pydantic.

What is wrong is said in one line with the field and what was expected; `data.records.reading` adds the file and the
record's number. Other layouts are turned into these kinds, or into a `Chat`, by `data.records.formats`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from data.images.in_records import Illustrated
from data.records.chat import Chat
from data.records.fields import finite, from_text
from data.sample_set import IGNORED


class Pretrain(Illustrated):
    """Hold plain text; every token is trained."""

    type: Literal["pretrain"]
    text: str = Field(min_length=1)


class Passage(Pretrain):
    """Hold a text whose class is learnt: it is tokenized as it will be when it is asked for, without an end."""


class Instruct(Illustrated):
    """Hold one instruction and its answer; the answer is trained."""

    type: Literal["instruct"]
    instruct: str = Field(min_length=1)
    input: str | None = None
    output: str


def _described(value: Any) -> Any:
    if not isinstance(value, (str, dict, list)):
        raise ValueError(f"expected a string, an object or a list, found {json_type(value)}")
    return value if isinstance(value, str) else finite(value)


Described = Annotated[str | dict[str, Any] | list[Any], BeforeValidator(_described)]


class ApiCall(BaseModel):
    """Hold one step of a tool-using answer; all but the result is trained."""

    inner_thought: str
    api_name: str
    api_param: dict[str, Any]
    api_res: Described

    @field_validator("api_param", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        return from_text(value, "an object")


class ApiAnswer(BaseModel):
    """Hold an answer that was found by calling tools."""

    actions: list[ApiCall] = Field(fail_fast=True)
    ans: str


Said = tuple[Literal["ask", "ans"], str]
AnsweredByTools = tuple[Literal["ans-api"], ApiAnswer]


def _kind_of_round(entry: Any) -> str:
    return "ans-api" if isinstance(entry, (list, tuple)) and "ans-api" in entry[:1] else "said"


class _Dialogue(Illustrated):
    rounds: Sequence[tuple[str, str | ApiAnswer]]  # at least one of them an answer

    @model_validator(mode="after")
    def _check_answers(self) -> _Dialogue:
        if all(role == "ask" for role, _ in self.rounds):
            raise ValueError("rounds: expected at least one answer, found asks only")
        return self


class Conversation(_Dialogue):
    """Hold several rounds; every answer is trained."""

    type: Literal["conversation"]
    rounds: list[Said] = Field(min_length=1, fail_fast=True)


class ConverHasApi(_Dialogue):
    """Hold a dialogue with tool calls; thoughts, calls and answers are trained."""

    type: Literal["conver_has_api"]
    api_desc: Described
    rounds: list[  # the role decides, so that a complaint is about the right one
        Annotated[
            Annotated[Said, Tag("said")] | Annotated[AnsweredByTools, Tag("ans-api")],
            Discriminator(_kind_of_round),
        ]
    ] = Field(min_length=1, fail_fast=True)


class RefQA(_Dialogue):
    """Hold questions about a text; the answers are trained."""

    type: Literal["ref_qa"]
    reference: str
    rounds: list[Said] = Field(min_length=1, fail_fast=True)


class Segment(BaseModel):
    text: str
    label: bool


class Segments(Illustrated):
    """Hold a ready-made text in segments: nothing is added, and those with a `label` are trained."""

    type: Literal["segments"] = "segments"
    segments: list[Segment] = Field(min_length=1, fail_fast=True)

    @model_validator(mode="after")
    def _check(self) -> Segments:
        if not any(segment.label and segment.text for segment in self.segments):
            raise ValueError("segments: expected a label with at least one, found none that is trained")
        return self


class Tokenized(Illustrated):
    """Hold ready-made token ids; all are trained, or those that `labels` repeats (the others are IGNORED)."""

    type: Literal["tokenized"] = "tokenized"
    input_ids: list[NonNegativeInt] = Field(min_length=1, fail_fast=True)
    labels: list[int] | None = Field(None, fail_fast=True)
    attention_mask: list[Literal[1]] | None = Field(None, fail_fast=True)

    @model_validator(mode="after")
    def _check(self) -> Tokenized:
        labels = self.input_ids if self.labels is None else self.labels
        if len(labels) != len(self.input_ids):
            raise ValueError(f"labels: expected {len(self.input_ids)}, one for each of input_ids, found {len(labels)}")
        for place, (token, label) in enumerate(zip(self.input_ids, labels, strict=True)):
            if label not in (token, IGNORED):
                raise ValueError(f"labels[{place}]: expected {token}, as in input_ids, or {IGNORED}, found {label}")
        return self

    @property
    def trained(self) -> list[bool]:
        """Say of each token whether it is trained."""
        return [label != IGNORED for label in self.labels or self.input_ids]


Record = Pretrain | Instruct | Conversation | ConverHasApi | RefQA | Chat | Segments | Tokenized
KINDS: dict[str, type[Pretrain | Instruct | Conversation | ConverHasApi | RefQA]] = {
    "pretrain": Pretrain,
    "instruct": Instruct,
    "conversation": Conversation,
    "conver_has_api": ConverHasApi,
    "ref_qa": RefQA,
}
SPLIT_KIND = "pretrain"  # texts without turns: a piece of one is as good as the whole
TYPES = (
    *KINDS,
    "chat",
    "reasoning_chat",
    "tool_chat",
    "segments",
    "tokenized",
    "pair",
    "marked",
    "class",
)  # as which records are counted


def type_of(record: Record) -> str:
    """Return the type that a record is counted as: what a chat trains besides words tells it from others."""
    if isinstance(record, Chat) and any(message.tool_calls for message in record.messages):
        return "tool_chat"
    if isinstance(record, Chat) and any(message.reasoning_content for message in record.messages):
        return "reasoning_chat"
    return record.type


def explain(error: ValidationError, raw: Any = None, names: Mapping[str, Sequence[str]] = {}) -> str:
    """Write pydantic's first complaint as one line: `field rounds[2][1]: what was expected`.

    Args:
        raw: the object, by whose names fields are called.
        names: what an object may call a field.
    """
    first = error.errors()[0]
    steps: list[Any] = [step for step in first["loc"] if step not in ("said", "ans-api")]
    for number, step in enumerate(steps):
        if isinstance(raw, dict) and step not in raw:
            steps[number] = next((name for name in names.get(step, ()) if name in raw), step)
        with suppress(LookupError, TypeError):
            raw = raw[steps[number]]
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    if first["type"] == "missing":
        return f"field {place}: missing"
    if first["type"] == "model_type":
        return f"field {place}: expected an object, found {json_type(first['input'])}"
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        if place and not re.match(r"\w+: ", reason):  # else the reason begins with a field inside of this place
            return f"field {place}: {reason}"
        return f"field {place}{'.' if place else ''}{reason}"
    found = f", found {json_type(first['input'])}" if first["type"].endswith("_type") else ""
    found = ", found ''" if first["type"] == "string_too_short" else found
    reason = first["msg"].replace("Input should be a valid ", "expected a ").replace("Input should be ", "expected ")
    reason = reason.replace("String should have", "expected a text of")
    return f"field {place}: {reason}{found}"


def json_type(value: Any) -> str:
    """Return JSON's name of a value's type, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    default = "a number" if isinstance(value, (int, float)) else f"a {type(value).__name__}"  # of a Parquet column
    return names.get(type(value), default)


def origin(file: str, number: int) -> str:
    """Name a record's file and its number there, from 1 (0: the whole file)."""
    return f"{file}: record {number}" if number else file
