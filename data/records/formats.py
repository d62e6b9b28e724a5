"""Recognise a record's layout and convert it into Pipetune's own records.

A record has the first format of `FORMATS` whose required fields it has all of. Where that guess is wrong, `format:` in
data_path names the right one, and `columns:` says what files with names of their own call the fields. The layouts are
declared in `data.records.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import AliasChoices, BaseModel, ValidationError

from data.errors import DataError
from data.records import layouts
from data.records.chat import SPELLINGS, Chat
from data.records.fields import check_grades, check_left_over, left_over
from data.records.layouts import Layout
from data.records.record import KINDS, Record, explain, json_type, parse_record, shown

Names = Mapping[str, str]  # what a file calls our fields

FIELDS_SHOWN = 12
SPEAKERS = ("user", "assistant", "system", "tool")
PARTS = ("role", "content", *SPEAKERS)  # what columns may name of messages
LISTS = ("messages", "conversations", "conversation")  # of messages
DIALOGUES = (*LISTS, "dialogue", "rounds")  # fields that may hold the dialogue
# Beside a dialogue that ends with an answer: the same answer in other words (OpenR1-Math), not trained.
REWORDED = frozenset("answer answers completion output reference response responses target".split())


class Converted(NamedTuple):
    """Hold the records of one object."""

    records: list[Record]  # at least one
    unused: list[str]  # its fields that were not used, and that somebody might ask about
    columns: list[str]  # which of the names that columns gives it has


class Format(NamedTuple):
    """Describe how to recognise and convert a layout."""

    fields: tuple[tuple[str, ...], ...]  # what tells it; of each group one field has to be there
    known: tuple[tuple[str, ...], ...]  # all that it takes: the first one of each group that is there
    # Raises DataError or pydantic's ValidationError; notes which fields of its messages were not used.
    convert: Callable[[dict[str, Any], set[str]], list[Record]]

    def extra(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields it does not use."""
        return {name: raw[name] for name in _untaken(self.known, tuple(raw))}

    def __str__(self) -> str:
        return ", ".join("|".join(group) for group in self.fields)


def _format(layout: type[Layout]) -> Format:
    fields = layout.model_fields.items()
    known = {name: _names(name, field.validation_alias) for name, field in fields}
    required = tuple(known[name] for name, field in fields if field.is_required())
    return Format(
        required, tuple(known.values()), lambda raw, unused: layout.model_validate(raw, context=unused).records()
    )


def _names(name: str, alias: Any) -> tuple[str, ...]:
    return tuple(map(str, alias.choices)) if isinstance(alias, AliasChoices) else (name,)


PIPETUNE = Format((("type",),), (("type",),), lambda raw, _: [parse_record(raw)])
OWN = {kind: PIPETUNE._replace(known=tuple((name,) for name in model.model_fields)) for kind, model in KINDS.items()}
FORMATS: dict[str, Format] = {
    "pipetune": PIPETUNE,
    "openai": _format(layouts.OpenAI),
    "sharegpt": _format(layouts.ShareGPT),
    "function_calls": _format(layouts.FunctionCalls),
    "squad": _format(layouts.SquadArticle),
    "squad_paragraph": _format(layouts.SquadParagraph),
    "squad_row": _format(layouts.SquadRow),
    "self_instruct": _format(layouts.SelfInstruct),
    "alpaca": _format(layouts.Alpaca),
    "prompt_completion": _format(layouts.PromptCompletion),
    "question_answer": _format(layouts.QuestionAnswer),
    "segments": _format(layouts.ReadySegments),
    "tokens": _format(layouts.ReadyTokens),
    "text": _format(layouts.Text),
}
# What `columns` may name: the fields of all formats, and the parts of messages.
COLUMNS = {name for known in [*FORMATS.values(), *OWN.values()] for group in known.known for name in group}
COLUMNS |= {*PARTS}


def convert(raw: Any, format_name: str | None = None, columns: Names | None = None) -> Converted:
    """Convert one object of any known layout into records.

    Args:
        format_name: of `FORMATS`; recognised by the fields where absent.
        columns: what the object calls the fields; then it is up to the user which of the others are not used.

    Raises:
        DataError: no layout fits, a field is missing or has the wrong type, or one that matters, or that columns names,
            would not be used; the text names the field.
    """
    if not isinstance(raw, dict):
        raise DataError(f"expected an object, found {json_type(raw)}")
    if not columns:
        try:
            check_grades(raw)
        except ValueError as error:
            raise DataError(str(error)) from None
    named, mapped, parts = _renamed(raw, columns or {})
    there = {name: value for name, value in named.items() if value is not None}
    found = _find(there, named, format_name)
    try:
        inside: set[str] = set()
        records, extra = found.convert(there, inside), found.extra(there)
        if columns:
            check_left_over(extra, mapped)
            unused = [name for name in raw if (name in extra or name in mapped) and name not in mapped.values()]
        else:
            dialogues = [name for name in DIALOGUES if there.get(name) and isinstance(there[name], list)]
            if len(dialogues) > 1 and extra.keys() & {*dialogues}:
                raise DataError(f"fields {' and '.join(dialogues)}: expected one dialogue, or columns that name it")
            reworded = [name for name in extra if name in REWORDED and _ends_with_answer(records)]
            asked = {name: value for name, value in extra.items() if name not in reworded}
            unused = left_over(asked, lambda: "\n".join(_texts(records))) + reworded
        return Converted(records, unused + sorted(inside), [*mapped.values(), *parts.values()])
    except ValidationError as error:
        if len(raw) > 1 and all(map(_is_column, raw.values())):
            raise DataError("a table written column by column; expected one object for each record") from None
        first = error.errors()[0]
        if first["type"] == "missing" and len(first["loc"]) == 1 and first["loc"][0] in named:
            raise DataError(f"field {first['loc'][0]}: expected a value, found null") from None
        theirs = {name: [other] for name, other in (columns or {}).items()}
        raise DataError(explain(error, raw, SPELLINGS | theirs)) from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{'' if str(error).startswith('preference') else 'field '}{error}") from None


def _ends_with_answer(records: list[Record]) -> bool:
    return all(isinstance(record, Chat) and record.messages[-1].role == "assistant" for record in records)


def _is_column(value: Any) -> bool:
    return "0" in value if isinstance(value, dict) else isinstance(value, list) and set(map(type, value)) == {str}


@lru_cache
def _untaken(known: tuple[tuple[str, ...], ...], fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return the object's fields that a format does not use."""
    taken = {next((name for name in group if name in fields), None) for group in known}
    return tuple(name for name in fields if name not in taken)


@lru_cache
def _by_fields(fields: tuple[str, ...]) -> Format | None:
    """Find the first format that fits these fields (cached: a file's records mostly share them)."""
    others = (known for known in FORMATS.values() if known is not PIPETUNE)
    return next((known for known in others if all(set(group) & set(fields) for group in known.fields)), None)


def _find(there: dict[str, Any], named: dict[str, Any], format_name: str | None) -> Format:
    kind = there.get("type")
    if format_name in (None, "pipetune") and isinstance(kind, str) and kind in OWN:
        return OWN[kind]
    if format_name is not None:
        return FORMATS[format_name]
    if known := _by_fields(tuple(there)) or _by_fields(tuple(named)):
        return known
    if kind is not None:
        return PIPETUNE  # its complaint lists the types
    names = [shown(name) for name in list(named)[:FIELDS_SHOWN]] + ["..."] * (len(named) > FIELDS_SHOWN)
    formats = "; ".join(f"{name} ({known})" for name, known in FORMATS.items())
    raise DataError(
        f"no known format has the fields {', '.join(names) or '(none)'}; expected columns that name them, or those of "
        f"one of: {formats}"
    )


def _renamed(raw: dict[str, Any], columns: Names) -> tuple[dict[str, Any], Names, Names]:
    """Rename an object's fields to ours; also return which columns name its fields and its messages'."""
    if not columns:
        return raw, {}, {}
    of_messages = any(name in columns for name in PARTS if name != "system")  # alone it is a field
    parts = {name: theirs for name, theirs in columns.items() if of_messages and name in PARTS}
    mapped = {name: theirs for name, theirs in columns.items() if name not in parts and theirs in raw}
    renamed = {name: value for name, value in raw.items() if name not in mapped.values()}
    renamed |= {name: raw[theirs] for name, theirs in mapped.items()}
    lists = [name for name in LISTS if isinstance(renamed.get(name), list)]
    renamed |= {name: [_renamed_turn(turn, parts) for turn in renamed[name]] for name in lists if parts}
    return renamed, mapped, parts if lists else {}


def _renamed_turn(turn: Any, columns: Names) -> Any:
    """Rename the fields of a message."""
    if not isinstance(turn, dict):
        return turn
    names = {columns.get(name, name): name for name in ("role", "content")}
    turn = {names.get(name, name): value for name, value in turn.items()}
    speakers = {columns[name]: name for name in SPEAKERS if name in columns}
    for name in ("role", "from"):
        if isinstance(turn.get(name), str):
            turn[name] = speakers.get(turn[name], turn[name])
    return turn


def _texts(value: Any) -> Iterator[str]:
    """Return all strings in records."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, BaseModel):
        yield from _texts({name: field for name, field in value if name != "type"})
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
