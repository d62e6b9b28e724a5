"""Decide which unused fields are harmless and which stop the run.

A field that a person would expect to be trained on, or to decide what is, is never dropped in silence. A layout takes
it, or the record is refused by its name. Of the others those that say nothing about the training (ids, sources) are
passed over, and the rest are named once in the report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import from_json

from data.images.in_records import NAMES

EMPTY: tuple[Any, ...] = (None, "", [], {})
ALONE = "expected the key preference, or good answers alone, as prompt and completion"
MARKED = f"{ALONE}; preference: kto learns from marked answers"
# A field grades an answer if it has one of the first words, and nothing but the second beside them.
GRADES = frozenset(
    "chosen reject rejected preferred dispreferred preference desirable undesirable winner loser better worse bad "
    "positive negative kto".split()
)
ANSWERS = frozenset(
    "answer answers completion completions conversation conversations generation id ids index input is label message "
    "messages model non not output outputs response responses score tag text".split()
)
NO_PLACE = "{name}: the record's format has no place for it"
PAIRED = re.compile(r"(?:response|answer|output|completion|generation|conversation|messages?)_?[ab012]")
BAD = ("bad", "negative", "rejected", "dislike", "thumbs_down", "undesirable")  # what a grade says, or a number below 0
SECOND_TEXT = re.compile(  # beside the one that a class is learnt of
    r"(?:text|sentence|premise|hypothesis|question|query|answer|passage|paragraph|document|context|content|claim|"
    r"evidence|instruction|input)s?_?(?:pair|[ab0-9])?"
)
MEDIA = frozenset("audio audios video videos objects bbox bboxes".split())
# 1 and true say what is done anyway.
SWITCHES = frozenset("weight train training trainable loss loss_weight loss_scale".split())
MATTERS = SWITCHES | frozenset(
    "answer answers article assistant_mask assistant_masks background chat_template_kwargs choices completion "
    "completion_mask "
    "context contexts conversation conversations cot dialogue document documents functions generation history "
    "input inputs instruction instructions knowledge label labels loss_mask mask masked messages options "
    "output outputs passage passages position_ids prompt query question reasoning reasoning_content reasoning_details "
    "reference refusal "
    "response responses rounds segments seq_lengths system system_prompt target targets thinking thought "
    "tools train_detail training_detail".split()
)
QUIET = frozenset(
    "category created_at date dataset domain file hash id idx index lang language license meta metadata model name "
    "n_tokens number origin score source split tags task timestamp title topic type url uuid version".split()
)


def from_text(value: Any, expected: str) -> Any:
    """Decode a field that some datasets keep as a JSON string.

    Args:
        expected: what it holds, with its article.

    Raises:
        ValueError: the string is not JSON, or holds a number that JSON does not have.
    """
    try:
        value = from_json(value, allow_inf_nan=False) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"expected {expected} or a JSON string of one") from None
    return finite(value)


def finite(value: Any) -> Any:
    """Give a value back; raise a ValueError for a number that JSON does not have, such as what 1e999 is read as."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        raise ValueError("an infinite number, or none at all; expected numbers that JSON has") from None
    return value


def check_grades(fields: Mapping[str, Any]) -> None:
    """Refuse preference data, whose bad answers would be trained as good ones.

    Raises:
        ValueError: fields grade or pair answers.
    """
    if names := graded(fields):
        marked = all(isinstance(fields[name], bool) for name in names)
        raise ValueError(f"preference data (fields {', '.join(names)}): {MARKED if marked else ALONE}")


def graded(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that grade or pair answers."""
    there = {name: value for name, value in fields.items() if value not in EMPTY}
    pairs = [name for name in there if PAIRED.fullmatch(name.lower())]
    return [name for name, value in there.items() if _grades(name, value)] + (pairs if len(pairs) > 1 else [])


def _grades(name: str, value: Any) -> bool:
    """Test whether a field grades answers, by its name or by what it holds."""
    words = set(re.sub(r"(?<=[a-z])(?=[A-Z])|[\W\d_]+", " ", name).lower().split())
    if words & GRADES and words <= GRADES | ANSWERS:
        is_share = words & {"positive", "negative"} and type(value) in (int, float)  # of such words in a text
        return not is_share

    # A grade of the one answer: a bad one says so, or is below 0.
    if name in ("rating", "feedback", "label"):
        if isinstance(value, bool):
            return name == "label"
        if isinstance(value, (int, float)):
            return value < 0
        return isinstance(value, str) and value.lower() in BAD

    # A list of answers with a grade each, and no list of messages.
    first = value[0] if isinstance(value, list) and isinstance(value[0], dict) else {}
    return bool(first.keys() & {"score", "rating", "rank", "overall_score"}) and not first.keys() & {"role", "from"}


def unused_fields(extra: Mapping[str, Any], texts: Callable[[], str]) -> list[str]:
    """Return the unused fields worth reporting.

    Args:
        extra: the fields that the layout does not know.
        texts: returns all texts of the record; a field whose content is already there may be dropped.

    Raises:
        ValueError: a field matters; the text begins with its name.
    """
    unused = []
    for name, value in extra.items():
        if value in EMPTY or name in QUIET:
            continue
        if name in MEDIA:
            raise ValueError(f"{name}: expected records without it, as Pipetune trains on text and images alone")
        if name in NAMES:
            raise ValueError(f"{name}: expected images beside the messages, or as parts of what they say")

        idle = name in SWITCHES and value in (1, True)
        if name in MATTERS and not idle and not (isinstance(value, str) and value.strip() in texts()):
            raise ValueError(f"{NO_PLACE.format(name=name)}; expected it left out, or given one by columns")
        unused.append(name)
    return unused


def check_columns(extra: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Check unused fields where the user set columns: only the named ones and marks of bad answers matter.

    Raises:
        ValueError: as `unused_fields`.
    """
    for name, value in extra.items():
        if name in ("label", "kto_tag") and value is False:
            raise ValueError(f"preference data (fields {name}): {MARKED}")
        if name in columns and value not in EMPTY:
            raise ValueError(f"{NO_PLACE.format(name=name)}; expected no column {columns[name]} for it")
