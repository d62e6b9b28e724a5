"""Values of a config, each with the reason why it was chosen, and those that the user has chosen.

Keys are dotted, `optimizer.params.lr`. What the command line says counts from the beginning: all that is chosen later
rests on it. They become YAML that anybody can go on with; beside each value its reason stands as a comment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from common.terminal import safe_line
from training.config.changes import leaves
from training.config.keys import TrainConfig
from training.config.yaml_file import checked, override

YOURS = "yours"


class Choices:
    """What was chosen so far.

    Args:
        words: `key.sub=value` of the command line.

    Raises:
        ConfigError: a word is none.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._chosen: dict[str, tuple[Any, str]] = {}
        self.own = dict(leaves(self._raw()))  # what the user has chosen

    def add(self, key: str, value: Any, reason: str) -> None:
        """Choose a value, which the user's own goes before."""
        self._chosen[key] = value, reason

    def is_own(self, key: str) -> bool:
        """Whether the user has chosen a key, or something in that section."""
        return any(f"{own}.".startswith(f"{key}.") for own in self.own)

    def config(self, **missing: Any) -> TrainConfig:
        """The config that they make.

        Args:
            missing: values of keys that are not chosen yet.

        Raises:
            ConfigError: the user's own values make none.
        """
        return checked(TrainConfig, missing | self._raw(), "command line: ")

    def as_yaml(self, heading: Iterable[str]) -> str:
        """A config file.

        Args:
            heading: lines of a comment at the top.
        """
        lines = [*(f"# {safe_line(line)}" for line in heading), ""]
        self._write(self._raw(), "", lines)
        return "\n".join(lines) + "\n"

    def _raw(self) -> dict[str, Any]:
        """All values, nested as in YAML."""
        raw: dict[str, Any] = {}
        for key, (value, _) in self._chosen.items():
            *sections, last = key.split(".")
            section = raw
            for name in sections:
                section = section.setdefault(name, {})
            section[last] = value
        for word in self._words:
            override(raw, word)
        return raw

    def _write(self, section: Mapping[str, Any], prefix: str, lines: list[str]) -> None:
        indent = "  " * prefix.count(".")
        for name, value in section.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and value:
                lines.append(f"{indent}{name}:")
                self._write(value, f"{key}.", lines)
                continue
            _, reason = (None, YOURS) if key in self.own else self._chosen.get(key, (None, YOURS))
            text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
            lines.append(f"{indent}{name}: {text.splitlines()[0]}  # {safe_line(reason)}")
