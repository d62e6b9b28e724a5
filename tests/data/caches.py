"""What the tests of the cache share: files of records written a while ago, and what lies in a cache's folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.chat.prompts import Prompts
from data.tokenized.dataset import Dataset
from data.tokenized.recipe import DataFile, Recipe

LIMIT = 160
JUDGED_LIMIT = 320  # of a document of preferences

Load = Callable[..., Dataset]


def records(count: int, answer: str = "One is a number.") -> list[dict[str, Any]]:
    return [{"type": "instruct", "instruct": f"What is {number}?", "output": answer} for number in range(count)]


def write(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    age(path)
    return path


def age(path: Path, seconds: float = 60) -> None:
    """As if the file had been written a while ago, so that its digest is worth remembering."""
    os.utime(path, (time.time() - seconds,) * 2)


def caches(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "datasets").iterdir())


def left_over(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache" / "builds").iterdir() if path.is_dir()]


def plain_recipe(data: Path, tokenizer: Path, **changes: Any) -> Recipe:
    prompts = {name: changes.pop(name) for name in Prompts.__dataclass_fields__ if name in changes}
    fields: dict[str, Any] = {"max_seq_len": LIMIT} | changes
    return Recipe((DataFile(str(data)),), str(tokenizer), Prompts(**{"prompt_format": "plain"} | prompts), **fields)
