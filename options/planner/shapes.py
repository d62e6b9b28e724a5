"""Know the shapes of well-known models, to plan a run before its model is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")  # name -> the keys of config.json that differ from transformers' defaults


def shape_of(model_path: str) -> tuple[str, dict[str, Any]] | None:
    """Find the shape that a path names in its last known part, such as ../llm/llama-7b/base.

    Returns:
        The name and its config.json; none where the folder exists, or no part of the path is a known name.
    """
    if Path(model_path).exists():
        return None
    shapes: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    name = next((part for part in reversed(Path(model_path).parts) if part.lower() in shapes), None)
    return (name, shapes[name.lower()]) if name else None
