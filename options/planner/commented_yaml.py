"""Write values by dotted key as YAML, each with a comment that says why it is so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml

from common.terminal import safe_line


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Put values by dotted key into their sections."""
    sections: dict[str, Any] = {}
    for dotted, value in values.items():
        *parents, name = dotted.split(".")
        section = sections
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return sections


def commented(sections: Mapping[str, Any], why: Mapping[str, str], otherwise: str = "", prefix: str = "") -> list[str]:
    """Return the lines of nested values.

    Args:
        why: the comment of each dotted key.
        otherwise: the comment of a key that has none there.
    """
    lines: list[str] = []
    indent = "  " * prefix.count(".")
    for name, value in sections.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in why:
            lines += [f"{indent}{name}:", *commented(value, why, otherwise, f"{key}.")]
            continue
        text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
        lines.append(f"{indent}{name}: {text.splitlines()[0]}  # {safe_line(why.get(key, otherwise))}")
    return lines
