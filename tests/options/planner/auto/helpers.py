"""`--auto` without a process of its own, for devices that are only named: nothing is timed then."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from options import RunConfig
from options.planner.auto.command import configure
from tests.conftest import FAQ, save_tokenizer
from tests.options.planner.helpers import llama

UNTRAINED = "from_scratch=true"  # of a model that has no weights yet


def auto(
    model: str | Path,
    save: Path,
    *words: str,
    data: str | Path = FAQ,
    devices: str | None = "2xA100-40G",
    dry_run: bool = False,
) -> Path:
    """The file that `--auto` gives."""
    asked = Namespace(model=str(model), data=[str(data)], save=str(save), overrides=list(words), devices=devices)
    asked.dry_run = dry_run
    return configure(RunConfig, asked, None)


def outline(folder: Path, name: str = "llama-7b", **changes: Any) -> Path:
    """A model's folder without its weights."""
    folder.mkdir()
    llama(folder, name, **changes)
    save_tokenizer(folder)
    return folder


def texts(path: Path, count: int, words: int) -> Path:
    """A file of long texts, no two alike."""
    records = [
        {"type": "pretrain", "text": " ".join(str(number + word) for word in range(words))} for number in range(count)
    ]
    path.write_text(json.dumps(records), encoding="utf-8")
    return path
