"""Define Pipetune's five kinds of record and two ready-made ones.

Kinds may be mixed. Every record is checked before
anything is trained, and what is wrong is said in one line with the field and what was expected; `data.records.reading`
adds the file and the record's number. Other layouts are turned into these kinds, or into a `Chat`, by
`data.records.formats`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    NonNegativeInt,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from data.errors import DataError
from data.records.chat import Chat
from data.records.fields import from_text
from data.sample_set import IGNORED

NAMED = r"\w+: "  # how a complaint about a field begins


class Pretrain(BaseModel):
    """Hold plain text; every token is trained."""

    type: Literal["pretrain"]
    text: str = Field(min_length=1)


class Instruct(BaseModel):
    """Hold one instruction and its answer; the answer is trained."""

    type: Literal["instruct"]
    instruct: str = Field(min_length=1)
    input: str | None = None
    output: str


class ApiCall(BaseModel):
    """Hold one step of a tool-using answer; all but the result is trained."""

    inner_thought: str
    api_name: str
    api_param: dict[str, Any]
    api_res: str | dict[str, Any] | list[Any]

    @field_validator("api_param", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        return from_text(value, "an object")


class ApiAnswer(BaseModel):
    """Hold an answer that was found by calling tools."""

    actions: list[ApiCall] = Field(fail_fast=True)
    ans: str


Ask = tuple[Literal["ask"], str]
Ans = tuple[Literal["ans"], str]
AnsApi = tuple[Literal["ans-api"], ApiAnswer]
Round = Annotated[  # the role decides, so that a complaint is about the right one
    Annotated[Ask, Tag("ask")] | Annotated[Ans, Tag("ans")] | Annotated[AnsApi, Tag("ans-api")],
    Discriminator(lambda entry: entry[0]),
]


class _Dialogue(BaseModel):
    rounds: list[Round] = Field(min_length=1, fail_fast=True)

    @field_validator("rounds", mode="before")
    @classmethod
    def _check_rounds(cls, rounds: Any) -> Any:
        roles = ("ask", "ans", "ans-api") if cls is ConverHasApi else ("ask", "ans")
        if not isinstance(rounds, list):
            return rounds  # pydantic says what is wrong
        for number, entry in enumerate(rounds):
            if not isinstance(entry, (list, tuple)) or len(entry) != 2:
                raise ValueError(f"rounds[{number}]: expected a pair of role and text")
            if entry[0] not in roles:
                raise ValueError(f"rounds[{number}][0]: expected one of {', '.join(roles)}, found {shown(entry[0])}")
        if rounds and not any(entry[0] != "ask" for entry in rounds):
            raise ValueError("rounds: expected at least one answer, found asks only")
        return rounds


class Conversation(_Dialogue):
    """Hold several rounds; every answer is trained."""

    type: Literal["conversation"]


class ConverHasApi(_Dialogue):
    """Hold a dialogue with tool calls; thoughts, calls and answers are trained."""

    type: Literal["conver_has_api"]
    api_desc: str

    @field_validator("api_desc", mode="before")
    @classmethod
    def _write(cls, value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


class RefQA(_Dialogue):
    """Hold questions about a text; the answers are trained."""

    type: Literal["ref_qa"]
    reference: str


class Segment(BaseModel):
    text: str
    label: bool


class Segments(BaseModel):
    """Hold a ready-made text in segments: nothing is added, and those with a `label` are trained."""

    type: Literal["segments"] = "segments"
    segments: list[Segment] = Field(min_length=1, fail_fast=True)

    @model_validator(mode="after")
    def _check(self) -> Segments:
        if not any(segment.label and segment.text for segment in self.segments):
            raise ValueError("segments: expected a label with at least one, found none that bears loss")
        return self


class Tokenized(BaseModel):
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


Record = Pretrain | Instruct | Conversation | ConverHasApi | RefQA | Chat | Segments | Tokenized
KINDS: dict[str, type[Pretrain | Instruct | Conversation | ConverHasApi | RefQA]] = {
    "pretrain": Pretrain,
    "instruct": Instruct,
    "conversation": Conversation,
    "conver_has_api": ConverHasApi,
    "ref_qa": RefQA,
}
TYPES = (*KINDS, "chat", "reasoning_chat", "tool_chat", "segments", "tokenized")  # as which records are counted


def type_of(record: Record) -> str:
    """Return the type that a record is counted as: what a chat trains besides words tells it from others."""
    if isinstance(record, Chat) and any(message.tool_calls for message in record.messages):
        return "tool_chat"
    if isinstance(record, Chat) and any(message.reasoning_content for message in record.messages):
        return "reasoning_chat"
    return record.type


def parse_record(raw: Any) -> Record:
    """Parse one record from its JSON object.

    Raises:
        DataError: an unknown type, a missing field or a value of the wrong type; the text names the field.
    """
    if not isinstance(raw, dict):
        raise DataError(f"expected an object with a type, found {json_type(raw)}")
    kind = raw.get("type")
    if kind is None:
        raise DataError(f"field type: missing; expected one of {', '.join(KINDS)}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise DataError(f"field type: expected one of {', '.join(KINDS)}, found {shown(kind)}")
    try:
        return KINDS[kind].model_validate(raw)
    except ValidationError as error:
        raise DataError(explain(error)) from None


def explain(error: ValidationError, raw: Any = None, names: Mapping[str, Sequence[str]] = {}) -> str:
    """Write pydantic's first complaint as one line: `field rounds[2][1]: what was expected`.

    Args:
        raw: the object, by whose names fields are called.
        names: what an object may call a field.
    """
    first = error.errors()[0]
    steps: list[Any] = [step for step in first["loc"] if step not in ("ask", "ans", "ans-api")]
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
        if not place or reason.startswith("rounds"):
            return f"field {reason}"
        return f"field {place}{'.' if re.match(NAMED, reason) else ': '}{reason}"
    found = f", found {json_type(first['input'])}" if first["type"].endswith("_type") else ""
    reason = first["msg"].replace("Input should be a valid ", "expected a ").replace("Input should be ", "expected ")
    return f"field {place}: {reason}{found}"


def shown(value: Any) -> str:
    """Format a value for a complaint, cut if it is long."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else json_type(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def json_type(value: Any) -> str:
    """Return JSON's name of a value's type, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    default = "a number" if isinstance(value, (int, float)) else f"a {type(value).__name__}"  # of a Parquet column
    return names.get(type(value), default)
