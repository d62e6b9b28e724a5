"""Map keys and values of other tools to Pipetune's: foreign_names.yml, by what is looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
TOOLS: dict[str, str] = _TABLE["tools"]  # by their letters
OTHERS: list[tuple[str, str, str]] = _TABLE["keys"]  # our key, advice, names with the letters of their tools

FOREIGN: dict[str, tuple[str, str, list[str]]] = {}  # another tool's name -> our key, advice, the tools
NAMES: dict[str, dict[str, list[str]]] = {tool: {} for tool in TOOLS.values()}  # the tool's names of our key
for _key, _advice, _names in OTHERS:
    for _name, _, _letters in (each.partition(":") for each in _names.split()):
        FOREIGN[_name] = _key, _advice, [TOOLS[letter] for letter in _letters]
        for _letter in _letters:
            NAMES[TOOLS[_letter]].setdefault(_key, []).append(_name)

VALUES: dict[str, dict[str, str]] = {}  # by our key other tools' values, in small letters, and ours
for _key, _values in _TABLE["values"].items():
    VALUES[_key] = {}
    for _ours, _theirs in _values.items():
        VALUES[_key] |= dict.fromkeys(str(_theirs).lower().split(), _ours)
