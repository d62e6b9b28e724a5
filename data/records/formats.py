"""Recognise a record's layout and convert it into Pipetune's own records.

A record has the first format of `FORMATS` whose required fields it has all of. Where that guess is wrong, `format:` in
data_path names the right one, and `columns:` says what files with names of their own call the fields. The layouts are
declared in `data.records.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from pydantic import AliasChoices, BaseModel, ValidationError

from common.quantities import counted
from data.errors import DataError
from data.images.image import Image
from data.images.in_records import Look, take_images
from data.images.marks import numbers_in
from data.records import layouts
from data.records.chat import SPELLINGS, Chat
from data.records.fields import EMPTY, SECOND_TEXT, check_columns, check_grades, unused_fields
from data.records.layouts import RecordLayout
from data.records.pairs import ASKED, Judged, answers_alone, split_judged, unpaired
from data.records.record import KINDS, Record, explain, json_type
from data.settings import FormatName, Wanted

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

    records: list[Record]  # at least one, or none where there are preferences
    unused: list[str]  # its fields that were not used, and that somebody might ask about
    columns: list[str]  # which of the names that columns gives it has
    judged: list[Judged] = []  # preferences: at least one where they are expected; nobody changes it


class Format:
    """Describe how to recognise a layout."""

    def __init__(self, layout: type[BaseModel]) -> None:
        self.layout = layout
        fields = layout.model_fields.items()
        self.fields = {name: _names(name, field.validation_alias) for name, field in fields}  # what each may be called
        self.required = [self.fields[name] for name, field in fields if field.is_required()]  # what it is known by

    def unknown(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields it does not use; of several names for one field it uses the first."""
        used: set[str] = set()
        for names in self.fields.values():
            used.update([name for name in names if name in raw][:1])
        return {name: value for name, value in raw.items() if name not in used}

    def __str__(self) -> str:
        return ", ".join("|".join(names) for names in self.required)


def _names(name: str, alias: Any) -> tuple[str, ...]:
    return tuple(map(str, alias.choices)) if isinstance(alias, AliasChoices) else (name,)


OWN = {kind: Format(model) for kind, model in KINDS.items()}  # known by their `type`
FORMATS: dict[FormatName, Format] = {
    "openai": Format(layouts.OpenAI),
    "sharegpt": Format(layouts.ShareGPT),
    "function_calls": Format(layouts.FunctionCalls),
    "squad": Format(layouts.SquadArticle),
    "squad_paragraph": Format(layouts.SquadParagraph),
    "squad_row": Format(layouts.SquadRow),
    "self_instruct": Format(layouts.SelfInstruct),
    "alpaca": Format(layouts.Alpaca),
    "prompt_completion": Format(layouts.PromptCompletion),
    "question_answer": Format(layouts.QuestionAnswer),
    "segments": Format(layouts.ReadySegments),
    "tokens": Format(layouts.ReadyTokens),
    "text": Format(layouts.Text),
}


def convert(
    raw: Any,
    format_name: str | None = None,
    columns: Names | None = None,
    preference: Wanted | None = None,
    look: Look | None = None,
) -> Converted:
    """Convert one object of any known layout into records.

    Args:
        format_name: of `data.settings.FORMAT_NAMES`; recognised by the fields where absent.
        columns: what the object calls the fields; then it is up to the user which of the others are not used.
        preference: which kind is expected; none where absent.
        look: opens an image of the object; none may be there where absent.

    Raises:
        DataError: no layout fits, a field is missing or has the wrong type, or one that matters, or that columns names,
            would not be used; the text names the field.
    """
    if not isinstance(raw, dict):
        raise DataError(f"expected an object, found {json_type(raw)}")

    named, mapped, parts = _renamed(raw, columns or {})
    there = {name: value for name, value in named.items() if value is not None}
    classes = preference is not None and preference.kind == "classes"
    read = partial(
        _read, raw=raw, format_name=format_name, columns=columns or {}, mapped=mapped, answered=not classes, look=look
    )
    with_columns = [*mapped.values(), *parts.values()]
    try:
        if preference is not None:
            judged, unused = _judged(there, preference, read)
            # A field that is not read may lie inside of another, and so not in the object.
            second = [name for name in unused if SECOND_TEXT.fullmatch(name.lower()) and raw.get(name) not in EMPTY]
            if classes and second:
                raise ValueError(f"{second[0]}: a second text beside the first; expected both in one, or none")
            return Converted([], unused, with_columns, judged)

        if not columns:
            check_grades(raw)
        return Converted(*read(there, named), with_columns)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{'' if str(error).startswith('preference') else 'field '}{error}") from None


def _judged(
    there: dict[str, Any], preference: Wanted, read: Callable[..., tuple[list[Record], list[str]]]
) -> tuple[list[Judged], list[str]]:
    """Convert an object of preferences; also return its unused fields."""
    found, unused = split_judged(there, preference)
    made = []
    for each in found:
        documents: list[Record] = []
        names = ("chosen", "rejected") if len(each.documents) > 1 else ("",)  # for what is wrong with one of them
        for name, fields in zip(names, each.documents, strict=True):
            try:
                records, more = read(fields, fields)
            except (DataError, ValueError) as error:
                raise DataError(f"{name}: {error}" if name else str(error)) from None
            if len(records) > 1:
                raise DataError(f"expected an object that makes one record, found one that makes {len(records)}")
            documents += records
            unused += [field for field in more if field not in unused]
        made.append(answers_alone(each._replace(documents=tuple(documents))))

    if preference.kind == "marked" and made[0].kind == "pair":
        made = unpaired(made)
    return made, unused


def _read(
    there: dict[str, Any],
    named: dict[str, Any],
    raw: dict[str, Any],
    format_name: str | None,
    columns: Names,
    mapped: Names,
    answered: bool,  # whether something of a dialogue has to be trained
    look: Look | None,
) -> tuple[list[Record], list[str]]:
    """Convert an object without preferences, whose fields have our names; also return its unused fields."""
    there, images = take_images(there, look)
    try:
        found = _find(there, named, format_name)
        extra = found.unknown(there)
        inside: set[str] = set()  # fields of messages that are not used
        made = found.layout.model_validate(there, context=inside)
        records: list[Record] = made.records() if isinstance(made, RecordLayout) else [made]  # type: ignore[list-item]
    except ValidationError as error:
        if len(raw) > 1 and all(map(_is_column, raw.values())):
            raise DataError("a table written column by column; expected one object for each record") from None
        first = error.errors()[0]
        if first["type"] == "missing" and len(first["loc"]) == 1 and first["loc"][0] in named:
            raise DataError(f"field {first['loc'][0]}: expected a value, found null or an empty cell") from None
        theirs = {name: [other] for name, other in columns.items()}
        theirs["instruct"] = [columns.get(name, name) for name in ASKED]
        raise DataError(explain(error, raw, SPELLINGS | theirs)) from None

    if images:
        records = [_illustrated(records, images)]
    if answered and any(isinstance(record, Chat) and not record.answered for record in records):
        raise DataError("field messages: expected at least one of the assistant, found none that is trained")
    if columns:
        check_columns(extra, mapped)
        unused = [name for name in raw if (name in extra or name in mapped) and name not in mapped.values()]
    else:
        unused = _unused(there, extra, records)
    return records, unused + sorted(inside)


def _illustrated(records: list[Record], images: tuple[Image, ...]) -> Record:
    """Give a record its images, each of which a mark in its texts has to stand for."""
    if len(records) > 1:
        raise DataError(f"images: expected an object that makes one record, found one that makes {len(records)}")
    placed = sorted(numbers_in("".join(_texts(records))))
    if placed != list(range(len(images))):
        expected = f"expected a place in what is said for {counted(len(images), 'image')}"
        raise DataError(f"images: {expected}, found {len(placed)}")
    return records[0].model_copy(update={"images": images})


def _unused(there: Mapping[str, Any], extra: Mapping[str, Any], records: list[Record]) -> list[str]:
    """Return the unused fields worth reporting; refuse those that matter."""
    dialogues = [name for name in DIALOGUES if there.get(name) and isinstance(there[name], list)]
    if len(dialogues) > 1 and extra.keys() & {*dialogues}:
        raise DataError(f"fields {' and '.join(dialogues)}: expected one dialogue, or columns that name it")

    answered = all(isinstance(record, Chat) and record.messages[-1].role == "assistant" for record in records)
    reworded = [name for name in extra if name in REWORDED and answered]
    asked = {name: value for name, value in extra.items() if name not in reworded}
    return unused_fields(asked, lambda: "\n".join(_texts(records))) + reworded


def _is_column(value: Any) -> bool:
    return "0" in value if isinstance(value, dict) else isinstance(value, list) and set(map(type, value)) == {str}


@lru_cache
def _by_fields(fields: tuple[str, ...]) -> Format | None:
    """Find the first format that fits these fields (cached: a file's records mostly share them)."""
    fitting = (each for each in FORMATS.values() if all({*names} & {*fields} for names in each.required))
    return next(fitting, None)


def _find(there: dict[str, Any], named: dict[str, Any], format_name: str | None) -> Format:
    kind = there.get("type")
    if format_name in (None, "pipetune") and isinstance(kind, str) and kind in OWN:
        return OWN[kind]
    if format_name in FORMATS:
        return FORMATS[format_name]
    if format_name is None and (known := _by_fields(tuple(there)) or _by_fields(tuple(named))):
        return known
    if kind is not None or format_name:
        raise DataError(f"field type: expected one of {', '.join(OWN)}, found {kind!r:.60}")
    if any(isinstance(entry, dict) and entry.keys() & {"file_name", "hf_hub_url"} for entry in named.values()):
        raise DataError("a list of data sets, as in dataset_info.json; expected the files that it names in data_path")
    names = [f"{name!r:.60}" for name in list(named)[:FIELDS_SHOWN]]
    if len(named) > FIELDS_SHOWN:
        names.append("...")
    formats = "; ".join(f"{name} ({known})" for name, known in FORMATS.items())
    alone = next((f", such as {{text: {name}}} for a text alone" for name in ASKED if name in named), "")
    raise DataError(
        f"no known format has the fields {', '.join(names) or '(none)'}; expected columns that name them"
        f"{alone}, or those of one of: pipetune (type); {formats}"
    )


def _renamed(raw: dict[str, Any], columns: Names) -> tuple[dict[str, Any], Names, Names]:
    """Rename an object's fields to ours; also return which columns name its fields and its messages'."""
    if not columns:
        return raw, {}, {}

    of_messages = any(name in columns for name in PARTS if name != "system")  # alone it is a field
    parts = {name: theirs for name, theirs in columns.items() if of_messages and name in PARTS}
    mapped = {name: theirs for name, theirs in columns.items() if name not in parts and theirs in raw}

    # A field of the object that has one of our names, but that no column names, gives way to one that is named so.
    renamed = {name: value for name, value in raw.items() if name not in mapped.values()}
    renamed |= {name: raw[theirs] for name, theirs in mapped.items()}

    lists = [name for name in LISTS if isinstance(renamed.get(name), list)]
    if parts:
        for name in lists:
            renamed[name] = [_renamed_turn(turn, parts) for turn in renamed[name]]
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
