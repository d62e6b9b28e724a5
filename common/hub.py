"""Recognise names on the HuggingFace hub, `OWNER/NAME` or `OWNER/NAME@REVISION`, of models and of data sets."""

from __future__ import annotations

import re
from pathlib import Path

MIRROR = "HF_ENDPOINT=https://hf-mirror.com"  # of the whole hub, reached from China
NAME = re.compile(r"(([\w-][\w.-]*)/[\w-][\w.-]*)(?:@(\S+))?")


def hub_name(path: str) -> tuple[str, str | None] | None:
    """Split a name and its revision, if any; None for a path, as one into a folder that is here is taken for."""
    found = NAME.fullmatch(path)
    if found is None or Path(found[2]).exists() or Path(path).exists():
        return None
    return found[1], found[3]


def other_ways(error: BaseException, name: str) -> str:
    """Name other ways to fetch a model, as the end of an error's line; nothing where the hub itself answered."""
    # By its name, as the hub's library speaks by httpx or httpx2, whichever its version has.
    if not any(kind.__name__ == "TransportError" for kind in type(error).__mro__):
        return ""
    return f"; other ways: {MIRROR} in front of the command, or modelscope download --model {name} --local_dir DIR"
