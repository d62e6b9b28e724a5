"""Read a run's YAML file and overrides, or say in one line what is wrong.

A key that `training.config.keys` does not have is refused with the nearest name. `key.sub=value` words on the command
line override the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from common.terminal import reason_of
from data.paths import read_small
from training.config.keys import ALIASES, TrainConfig
from training.config.passed_on import LEFT_OUT, NOT_PASSED_ON
from training.config.sections import reworded, sections_in, suggest
from training.errors import ConfigError

Config = TypeVar("Config", bound=TrainConfig)


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Read a YAML file, apply `key.sub=value` overrides, check the result.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown or has a wrong value.
    """
    return load_config_of(TrainConfig, path, overrides)


def load_config_of(kind: type[Config], path: str | Path, overrides: list[str] | None = None) -> Config:
    """Do the same for a config with keys of its own."""
    raw = _read_yaml(Path(path))
    for word in overrides or []:
        override(raw, word)
    return checked(kind, raw, f"{path}: ")


def checked(kind: type[Config], raw: dict[str, Any], place: str = "") -> Config:
    """Make a config of keys and values.

    Args:
        place: where they come from, for the message.

    Raises:
        ConfigError: a key is unknown or has a wrong value.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{place}{_explain(error, kind)}") from None


class _Loader(yaml.SafeLoader):
    """YAML with 1e-5 as a number (YAML 1.1 wants 1.0e-5), without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found, seen = super().construct_mapping(node, deep), set()  # keys that are no plain values are refused
        for key_node in (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"):
            if (key := self.construct_object(key_node, deep)) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return found


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = _parse_yaml(read_small(path).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; expected a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; expected fewer levels") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {place}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(raw).__name__}")
    for alias, name in ALIASES.items():
        if alias in raw:
            if name in raw:
                raise ConfigError(f"{path}: {alias} and {name} are one key; expected only one of them")
            raw[name] = raw.pop(alias)
    return raw


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only


def override(raw: dict[str, Any], word: str) -> None:
    """Apply a `key.sub=value` word to the keys and values of a config.

    Raises:
        ConfigError: it is none.
    """
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"command line: {word!r}: expected key.sub=value")
    key = ALIASES.get(key, key)
    *parents, last = key.split(".")
    section = raw
    for parent in parents:
        child = section.get(parent)
        child = {"enabled": child} if isinstance(child, bool) else child  # `bf16: true`
        if not isinstance(child, dict | None):
            raise ConfigError(f"command line: {key}: {parent} is a value, not a section")
        section[parent] = dict(child or {})  # a copy, as an alias in the file makes other keys the same section
        section = section[parent]
    try:
        section[last] = _parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"command line: {key}: {text!r} is not a YAML value") from None


def _explain(error: ValidationError, kind: type[TrainConfig]) -> str:
    unknown = ("extra_forbidden", "invalid_key")
    first = min(error.errors(), key=lambda each: each["type"] not in unknown)  # a misspelt key may be missing as well
    steps = [str(step) for step in first["loc"] if step != "[key]"]
    if steps and "data_path" in steps[0]:  # after the entry's number stands its form
        del steps[2:3]
    place = ".".join(steps)
    if first["type"] in unknown:
        if place in NOT_PASSED_ON:
            return f"{place}: {LEFT_OUT}"
        *sections, name = steps
        around: Any = kind
        for step in sections:
            if step in around.model_fields:  # else it is a place in a list
                around = sections_in(around.model_fields[step].annotation)[0]
        return f"unknown key {place}{suggest(name, around.model_fields, '.'.join(sections))}"
    if first["type"] == "missing":
        return f"{place}: missing"
    reason = str(first["ctx"]["error"]) if first["type"] == "value_error" else reworded(first["msg"])
    if not reason.startswith("expected"):
        return f"{place}.{reason}" if place else reason
    auto = ", which HF Trainer would fill in" if first["input"] == "auto" else ""
    return f"{place}: {reason}, found {first['input']!r}{auto}"
