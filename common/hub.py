"""Recognise names on the HuggingFace hub, `OWNER/NAME` or `OWNER/NAME@REVISION`, of models and of data sets."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"(([\w-][\w.-]*)/[\w-][\w.-]*)(?:@(\S+))?")


def hub_name(path: str) -> tuple[str, str | None] | None:
    """Split a name and its revision, if any; None for a path, as one into a folder that is here is taken for."""
    found = NAME.fullmatch(path)
    if found is None or Path(found[2]).exists() or Path(path).exists():
        return None
    return found[1], found[3]
