"""The golden folders of models of images and text, and what transformers made of their images and records."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from data.images.image import Image
from data.images.pictures import Pictures
from tests.conftest import SHARED

VISION = SHARED / "golden" / "vision"
NAMES = ("llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "mistral3")
needs_golden = pytest.mark.skipif(not VISION.is_dir(), reason="shared/golden/vision is not here")


def folder(name: str) -> Path:
    return VISION / f"{name}-tiny"


@cache
def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder(name) / "expected.json").read_text())
    return found


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(folder(name) / "expected.safetensors")


@cache
def pictures(name: str) -> Pictures:
    return Pictures(folder(name))


def looked_at(name: str, paths: list[str]) -> list[Image]:
    return [pictures(name).look(folder(name) / path, Path("unused")) for path in paths]
