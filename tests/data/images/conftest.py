"""Fixtures of images: golden model folders, and a data set with images loaded by one of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.tokenized.dataset import Dataset
from data.tokenized.loading import load_dataset

LoadSeen = Callable[..., Dataset]


@pytest.fixture
def vision(shared: Path) -> Path:
    """The golden folders of models of images and text."""
    if not (shared / "golden" / "vision").is_dir():
        pytest.skip(f"no golden files of images: {shared / 'golden' / 'vision'} is absent")
    return shared / "golden" / "vision"


@pytest.fixture
def load_seen(vision: Path, tmp_path: Path, settled: None) -> LoadSeen:
    """Write records beside `images/` of a model and load them, by its own template and a cache of the test's own."""

    def run(records: list[dict[str, Any]], model: str = "qwen2_5_vl-tiny", limit: int = 512, **options: Any) -> Dataset:
        folder = tmp_path / "data"
        if not folder.exists():
            shutil.copytree(vision / model / "images", folder / "images")
        file = folder / options.pop("name", "records.json")
        if records:
            file.write_text(json.dumps(records), encoding="utf-8")
        options.setdefault("prompt_format", "chat_template")
        options.setdefault("cache_dir", tmp_path / "cache")
        return load_dataset(str(file), options.pop("tokenizer", vision / model), limit, **options)

    return run
