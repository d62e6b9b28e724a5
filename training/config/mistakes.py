"""Say in plain words what is wrong with a config: all unknown keys at once, or the first wrong value."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from training.config.deepspeed_keys import REFUSED, WHY_REFUSED
from training.config.foreign_names import FOREIGN, VALUES
from training.config.section import sections_in, suggest

if TYPE_CHECKING:
    from training.config.keys import TrainConfig

UNKNOWN = ("extra_forbidden", "invalid_key")
MANY = 3  # keys of another tool, from which on the whole file is taken for one of its
WORDS = [  # pydantic's words, and ours
    (r"greater than or equal to", "at least"),
    (r"less than or equal to", "at most"),
    (r"a valid dictionary or (instance|object).*", "a section of keys"),
    (r"a valid dictionary", "a section of keys"),
    (r"a valid integer.*", "a whole number"),
    (r"a valid (number|boolean).*", r"a \1"),
    (r"a boolean", "true or false"),
    (r"a valid string", "text"),
    (r"a valid (list|array|tuple)", "a list"),
]


def explain(error: ValidationError, kind: type[TrainConfig]) -> str:
    """Describe all unknown keys, or the first error: a misspelt key may be reported as missing, too."""
    unknown = [each for each in error.errors() if each["type"] in UNKNOWN]
    if not unknown:
        return _wrong_value(error.errors()[0])
    lines = [_unknown_key(_steps(each), kind) for each in unknown]
    if len(lines) == 1:
        return lines[0]

    foreign = sum(_steps(each)[-1].lower() in FOREIGN for each in unknown)
    last = ["pipetune init --from FILE translates a whole file of another tool"] if foreign >= MANY else []
    listed = [line.removeprefix("unknown key ") for line in lines]
    return "\n  ".join([f"{len(lines)} unknown keys", *listed, *last])


def _steps(error: ErrorDetails) -> list[str]:
    steps = [str(step) for step in error["loc"] if step != "[key]"]
    if steps and "data_path" in steps[0]:  # the entry's form follows its number
        del steps[2:3]
    return steps


def _unknown_key(steps: list[str], kind: type[TrainConfig]) -> str:
    place = ".".join(steps)
    if place in REFUSED and place not in FOREIGN:
        return f"{place}: {WHY_REFUSED}"
    *sections, name = steps
    around: Any = kind
    for step in sections:
        if step in around.model_fields:  # else it is a number in a list
            around = sections_in(around.model_fields[step].annotation)[0]
    return f"unknown key {place}{suggest(name, around.model_fields, '.'.join(sections))}"


def _wrong_value(error: ErrorDetails) -> str:
    place, found = ".".join(_steps(error)), error["input"]
    if error["type"] == "missing":
        return f"{place}: missing"
    own = error["type"] == "value_error"
    reason = str(error["ctx"]["error"]) if own else in_our_words(error["msg"])
    if own and not reason.startswith("expected"):
        return f"{place}.{reason}" if place else reason

    said = "nothing" if found is None else repr(found)
    if found == "auto":
        said += ", which HF Trainer would fill in"
    meant = VALUES.get(place, {}).get(str(found).lower())
    return f"{place}: {reason}, found {said}{f'; did you mean {meant}?' if meant else ''}"


def in_our_words(message: str) -> str:
    """Say what pydantic says in our words."""
    reason = re.sub(r"^(Input should be|\w+ should have)", "expected", message)
    for theirs, ours in WORDS:
        reason = re.sub(theirs, ours, reason)
    return reason
