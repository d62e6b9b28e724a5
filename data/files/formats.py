"""Recognising the layout of a record, and turning it into Pipetune's own records.

A record has the first format of `FORMATS` whose required fields it has all of. Where that guess is wrong, `format:` in
data_path names the right one. The layouts themselves are declared in `data.files.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import AliasChoices, ValidationError

from data.errors import DataError
from data.files import layouts
from data.files.layouts import Layout
from data.records import KINDS, Record, explain, json_type, parse_record, shown

FIELDS_SHOWN = 12


class Format(NamedTuple):
    """How a layout is recognised and converted.

    Attributes:
        fields: what tells it; of each group one field has to be there.
        recognises: whether an object has them.
        convert: raises DataError or pydantic's ValidationError.
    """

    fields: tuple[tuple[str, ...], ...]
    recognises: Callable[[dict[str, Any]], bool]
    convert: Callable[[dict[str, Any]], list[Record]]

    def __str__(self) -> str:
        return ", ".join("|".join(group) for group in self.fields)


def _format(layout: type[Layout]) -> Format:
    fields = tuple(
        tuple(map(str, field.validation_alias.choices)) if isinstance(field.validation_alias, AliasChoices) else (name,)
        for name, field in layout.model_fields.items()
        if field.is_required()
    )
    return Format(
        fields,
        lambda raw: all(any(raw.get(name) is not None for name in group) for group in fields),
        lambda raw: layout.model_validate(raw).records(),
    )


FORMATS: dict[str, Format] = {
    "pipetune": Format(
        (("type",),),
        lambda raw: isinstance(raw.get("type"), str) and raw["type"] in KINDS,
        lambda raw: [parse_record(raw)],
    ),
    "openai": _format(layouts.OpenAI),
    "sharegpt": _format(layouts.ShareGPT),
    "squad": _format(layouts.SquadArticle),
    "squad_row": _format(layouts.SquadRow),
    "self_instruct": _format(layouts.SelfInstruct),
    "alpaca": _format(layouts.Alpaca),
    "prompt_completion": _format(layouts.PromptCompletion),
    "question_answer": _format(layouts.QuestionAnswer),
    "text": _format(layouts.Text),
}


def convert(raw: Any, format_name: str | None = None) -> list[Record]:
    """The records in one object of any known layout; at least one.

    Args:
        format_name: of `FORMATS`; recognised by the fields where absent.

    Raises:
        DataError: no layout fits, a field is missing or has the wrong type; the text names the field.
    """
    if not isinstance(raw, dict):
        raise DataError(f"expected an object, found {json_type(raw)}")
    try:
        return _find(raw, format_name).convert(raw)
    except ValidationError as error:
        raise DataError(explain(error)) from None


@lru_cache
def _by_fields(fields: tuple[str, ...]) -> Format | None:
    """The first format that takes these fields; a file's records mostly have the same ones."""
    there = dict.fromkeys(fields, True)
    return next((known for known in FORMATS.values() if known.recognises(there)), None)


def _find(raw: dict[str, Any], format_name: str | None) -> Format:
    if format_name is not None:
        return FORMATS[format_name]
    if "type" not in raw:  # its value would count
        known = _by_fields(tuple(name for name, value in raw.items() if value is not None))
    else:
        known = next((known for known in FORMATS.values() if known.recognises(raw)), None)
    if known is not None:
        return known
    if raw.get("type") is not None:
        return FORMATS["pipetune"]  # its complaint lists the types
    names = [shown(name) for name in list(raw)[:FIELDS_SHOWN]] + ["..."] * (len(raw) > FIELDS_SHOWN)
    formats = "; ".join(f"{name} ({known})" for name, known in FORMATS.items())
    raise DataError(
        f"no known format has the fields {', '.join(names) or '(none)'}; expected those of one of: {formats}"
    )
