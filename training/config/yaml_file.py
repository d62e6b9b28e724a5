"""Read a run's YAML file and its overrides from the command line.

What is wrong is said by `training.config.mistakes`. `key.sub=value` words on the command line override the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from common.terminal import is_safe_line, reason_of
from data.paths import read_small
from training.config.deepspeed_keys import FILE, OVERRIDES
from training.config.keys import ALIASES, TrainConfig
from training.config.mistakes import explain
from training.config.section import place_of
from training.errors import ConfigError

MOST_VALUES = 100_000  # in a config, with aliases and merge keys expanded
MERGE = "tag:yaml.org,2002:merge"

Config = TypeVar("Config", bound=TrainConfig)


def load_config_of(
    kind: type[Config], path: str | Path, overrides: list[str] | None = None, otherwise: dict[str, Any] | None = None
) -> Config:
    """Read a YAML file, apply `key.sub=value` overrides and check the result.

    Args:
        kind: which keys there are.
        otherwise: values of keys that are not given, instead of their defaults.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown or has a wrong value.
    """
    raw = _read_yaml(Path(path))
    overridden = [override(raw, word) for word in overrides or []]
    beside = f" with {raw[FILE]}" if raw.get(FILE) else ""
    return checked(kind, (otherwise or {}) | raw, f"{path}{beside}: ", overridden)


def checked(kind: type[Config], raw: dict[str, Any], place: str = "", overridden: Collection[str] = ()) -> Config:
    """Make a config of keys and values.

    Args:
        place: where they come from, for the message.
        overridden: keys that the command line gave.

    Raises:
        ConfigError: a key is unknown or has a wrong value.
    """
    try:
        return kind.model_validate(raw, context={OVERRIDES: overridden})
    except ValidationError as error:
        raise ConfigError(*f"{place}{explain(error, kind)}".splitlines()) from None


class _Loader(yaml.SafeLoader):
    """Read 1e-5 as a number (YAML 1.1 wants 1.0e-5); refuse repeated keys, alias bombs and control characters."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _size(node, {}) > MOST_VALUES:
            raise _error(f"more than {MOST_VALUES:,} values, with aliases and merge keys expanded", node)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if not is_safe_line(str(node.value)):  # which no key, path or name needs
            raise _error("a control character; expected printable text", node)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key, _ in node.value:
            if key.tag != MERGE and key.value in seen:
                raise _error(f"key {key.value!r} is repeated", key)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Count the values of a node; infinite where it contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = list(chain.from_iterable(parts))
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = parse_yaml(read_small(path).decode("utf-8-sig"))
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
    for alias in ALIASES.keys() & raw.keys():
        section, name = place_of(ALIASES[alias], raw, str(path))
        if name in section:
            raise ConfigError(f"{path}: {alias} and {ALIASES[alias]} are one key; expected only one of them")
        section[name] = raw.pop(alias)
    return raw


def parse_yaml(text: str) -> Any:
    """Read plain values; `_Loader` says what is refused."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only


def override(raw: dict[str, Any], word: str) -> str:
    """Apply a `key.sub=value` word to the keys and values of a config; return its key.

    Raises:
        ConfigError: it is not such a word.
    """
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"command line: {word!r}: expected key.sub=value")
    key = ALIASES.get(key, key)
    section, name = place_of(key, raw, "command line")
    try:
        section[name] = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"command line: {key}: {text!r} is not a YAML value") from None
    return key
