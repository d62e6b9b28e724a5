"""Dialogues with images, and what each sample of them has to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from data.images.image import Image
from data.images.processor import image_token_of
from data.sample_set import IGNORED, Sample

TEXT = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello!"}]}


def talk(*turns: tuple[str, str], images: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A dialogue of questions and answers."""
    messages = []
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {"messages": messages, **({"images": images} if images else {}), **fields}


A, B, C = (f"images/{name}.png" for name in "abc")


TWO = talk(("<image>One?", "First."), ("<image>Two?", "Second."), images=[A, B])


def image_token(vision: Path, model: str = "qwen2_5_vl-tiny") -> int:
    token = image_token_of(vision / model)
    assert token is not None
    return token


def check(sample: Sample, token: int) -> None:
    """As `check_places`, and no token of an image is trained."""
    check_places(sample, token)
    assert (numpy.asarray(sample["labels"])[numpy.asarray(sample["input_ids"]) == token] == IGNORED).all()


def check_places(sample: Sample, token: int) -> None:
    """Each image has its tokens from `begin` on, in order, and no other token is one."""
    places = numpy.flatnonzero(numpy.asarray(sample["input_ids"]) == token).tolist()
    for image in sample.get("images", []):
        assert image.begin == places[0]
        places = places[image.tokens :]
    assert not places


def look(source: str | bytes) -> Image:
    """Open nothing: the image's path tells what a record names."""
    return Image(source if isinstance(source, str) else f"{source!r}", "", 1, 1, 1)
