"""The settings of the data: their names and small types, for the config and for what reads the records.

Nothing here reads a record, so that who needs a config alone imports no reader.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

CHAT_TEMPLATE, PLAIN, GDGPT = "chat_template", "plain", "gdgpt"
NAMED = (CHAT_TEMPLATE, PLAIN, GDGPT)  # any other format of prompts is the path of a Jinja file
Fallback = Literal["rewrite", "refuse"]
Mask = Literal["assistant", "last_turn", "all"]
Truncate = Literal["turns", "oldest", "refuse"]
OnBadRecord = Literal["stop", "skip"]
Packing = Literal["batch", "dataset", False]  # what is packed together; `False` pads each sample

# The layouts of records; `data.records.formats` has what each is known by. `pipetune` are those with a `type`.
FormatName = Literal[
    "pipetune",
    "openai",
    "sharegpt",
    "function_calls",
    "squad",
    "squad_paragraph",
    "squad_row",
    "self_instruct",
    "alpaca",
    "prompt_completion",
    "question_answer",
    "segments",
    "tokens",
    "text",
]
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
TEXT_FILE = "text_file"  # a format of files, not of records: one file is one text

# What `columns` may name: the fields of all layouts, the parts of messages, and the fields of preferences.
COLUMNS = frozenset(
    "answer answers api_desc article assistant assistant_mask assistant_masks attention_mask background "
    "chat_template_kwargs chosen chosen_response chosen_score completion completion_mask completions content context "
    "context_text conversation conversations cot document functions generation generations history image image_path "
    "image_paths images input input_ids instances instruct instruction kto_tag label labels loss_mask margin messages "
    "non_preferred_output output outputs paragraphs parent_id passage placed_images position_ids preferred_output "
    "prompt qas query query_text question rank ranks ratings reasoning reasoning_content reference rejected "
    "rejected_messages rejected_response rejected_score response responses role rounds score_chosen score_rejected "
    "scores segments system system_prompt target text thinking thought tool tools type user".split()
)
GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}  # to a chat template, by Pipetune
PAIRED = ("pairs", "rewards")  # the kinds whose samples are two documents; rewards are scores of both


class Pixels(NamedTuple):
    """Hold between how many pixels images are resized to; None where the model's own processor decides."""

    least: int | None = None
    most: int | None = None


AS_THE_MODEL = Pixels()


class Wanted(NamedTuple):
    """Hold which kind of preference records are expected to have."""

    kind: Literal["pairs", "rewards", "marked", "classes"]
    labels: tuple[str, ...] = ()  # names of classes, in the order of their numbers

    @property
    def scored(self) -> bool:
        """Say whether whole documents are scored, so that no token is one to predict."""
        return self.kind in ("rewards", "classes")


def _check_arguments(value: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(value.keys() & GIVEN):
        raise PydanticCustomError("taken", "expected others than {name}, which Pipetune gives", {"name": taken[0]})
    return {name: _as_json(name, each) for name, each in value.items()}


def _as_json(name: str, value: Any) -> Any:
    """Make the value that the cache's key holds; YAML reads 2024-07-26 as a date, and a template has to write it so."""
    try:
        return json.loads(json.dumps(value, default=lambda date: date.isoformat(), allow_nan=False))
    except (AttributeError, TypeError, ValueError):
        raise PydanticCustomError("no_json", "{name}: expected a value of JSON or a date", {"name": name}) from None


# What a chat template gets beside the messages; pydantic checks it.
TemplateArguments = Annotated[dict[str, Any], AfterValidator(_check_arguments)]


class Source(BaseModel):
    """Hold one entry of `data_path`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    path: str | list[str] = Field(min_length=1)
    """A file, a folder, a glob or the name of a data set on the HuggingFace hub, or a list of them."""

    split: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """Which split of a data set on the hub; `train` without the key."""

    subset: str | None = None
    """Which subset of a data set on the hub, where it has several."""

    repeat: float = Field(default=1, gt=0, le=10_000, allow_inf_nan=False)
    """How often an epoch holds each record; fractions are allowed."""

    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The share of the epoch, relative to the weights of the other entries, which then need one each; not together with
    `repeat`."""

    format: str | None = None
    """The format of the records (docs/data.md#records), or `text_file`: a whole file is one text. Recognised without
    the key."""

    columns: dict[str, str] = {}
    """What the records call a format's fields, `{prompt: my_question}`; of messages also what their `role` and
    `content` are called, and who speaks as `user`, `assistant`, `system` and `tool`."""

    @field_validator("format", mode="after")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        names = [*FORMAT_NAMES, TEXT_FILE]
        if name is not None and name not in names:
            raise ValueError(f"expected one of {', '.join(names)}, found {name!r}")
        return name

    @field_validator("columns", mode="after")
    @classmethod
    def _fields(cls, columns: dict[str, str]) -> dict[str, str]:
        if unknown := sorted(columns.keys() - COLUMNS):
            raise ValueError(f"{unknown[0]}: no format has this field; expected some of {', '.join(sorted(COLUMNS))}")
        if repeated := [theirs for theirs, count in Counter(columns.values()).items() if count > 1]:
            raise ValueError(f"{repeated[0]}: expected it for one field, found it for several")
        return columns

    @model_validator(mode="after")
    def _one_of_them(self) -> Source:
        if self.weight is not None and "repeat" in self.model_fields_set:
            raise ValueError("expected either repeat or weight, found both")
        return self
