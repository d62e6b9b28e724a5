"""What all sections of a config have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from data.paths import with_home
from data.settings import Source
from training.config.foreign_names import FOREIGN
from training.errors import ConfigError

ALIKE = 0.8  # the share of letters that a misspelt name and the one that was meant have in common
FEW = 12  # names that fit into a message


class Section(BaseModel):
    """Keys that belong together; others are refused.

    Attributes:
        short_for: the key whose value may stand for the section, as in `preference: dpo`; `true` is the section with
            its defaults then. None where only keys are taken.
    """

    short_for: ClassVar[str | None] = None
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """Read `bf16: true` as `bf16: {enabled: true}`, `preference: dpo` as `preference: {loss: dpo}`."""
        if isinstance(value, (dict, cls)):
            return value
        if cls.short_for is not None and isinstance(value, (bool, str)):
            if value is False:
                raise ValueError("expected keys, or the section left out")
            return {} if value is True else {cls.short_for: value}
        if "enabled" not in cls.model_fields:
            return value
        if not isinstance(value, bool):
            raise ValueError("expected true, false or {enabled: true}")
        return {"enabled": value}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Take the same in an editor."""
        schema = handler(core_schema)
        if cls.short_for is not None:
            return {"anyOf": [{"type": ["boolean", "string"]}, schema]}
        return {"anyOf": [{"type": "boolean"}, schema]} if "enabled" in cls.model_fields else schema

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `save_interval: yes`, which pydantic reads as 1."""
        kinds = list(_kinds(cls.model_fields[str(info.field_name)].annotation))
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise ValueError("expected a number")
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield a type and those that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """List the sections that a field's type names."""
    return [kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def expected(words: str) -> WrapValidator:
    """Describe a union of types in one phrase; pydantic would report an error for each of its types."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"expected {words}") from None

    return WrapValidator(check)


def suggest(name: object, known: Iterable[str], section: str = "") -> str:
    """Suggest the key that was meant, or list those that there are."""
    known, prefix = list(known), f"{section}." if section else ""
    key, advice, _ = FOREIGN.get(str(name).lower().replace("-", "_"), (None, "", []))
    if key == "":
        return f"; {advice}"
    if key and key != f"{prefix}{name}" and section.partition(".")[0] in ("", key.partition(".")[0]):
        return f"; did you mean {key}?{f' ({advice})' if advice else ''}"
    if near := get_close_matches(str(name), known, n=1, cutoff=ALIKE):
        return f"; did you mean {prefix}{near[0]}?"
    return f"; expected one of {', '.join(known)}" if len(known) <= FEW else ""


def place_of(key: str, raw: dict[str, Any], source: str) -> tuple[dict[str, Any], str]:
    """Find the section of a dotted key, made where it is missing, and the key's name in it."""
    *parents, name = key.split(".")
    section = raw
    for parent in parents:
        child = section.get(parent)
        child = {"enabled": child} if isinstance(child, bool) else child  # `bf16: true`
        if not isinstance(child, dict | None):
            raise ConfigError(f"{source}: {key}: {parent} is a value, not a section")
        section[parent] = dict(child or {})  # a copy, as an alias in the file makes other keys the same section
        section = section[parent]
    return section, name


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested sections with their dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# `~` becomes the home folder, as no shell expands it in a file.
PathText = Annotated[str, AfterValidator(with_home)]
NewPathText = Annotated[str, Field(min_length=1), AfterValidator(with_home)]


def _as_list(value: Any) -> Any:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# The form of an entry decides its type, so that an error is about the right one.
_Entry = Annotated[
    Annotated[str, Tag("path")] | Annotated[Source, Tag("source")],
    Discriminator(lambda entry: "source" if isinstance(entry, (dict, Source)) else "path"),
]
DataPath = Annotated[list[_Entry], BeforeValidator(_as_list, json_schema_input_type=_Entry | list[_Entry])]
