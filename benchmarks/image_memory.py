"""Make models of images and text whose tower takes as much memory as their blocks, and rows with images for them.

Their layouts are Qwen2.5-VL's, which takes images of any size, and Gemma 3's, of one size. Pixels are random numbers in
the form that the model's image processor gives, so neither files nor a processor is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.collation import Carried, Collation
from data.images.ahead import PictureSettings
from data.images.collation import SeeingCollation
from data.images.image import Image
from data.sample_set import InMemory, Sample
from models.images.tensors import GRIDS

if TYPE_CHECKING:
    from data.loader import GlobalBatch, Loader
    from models.sees import Sees

IMAGE, SIDE = 5, 16  # the id of an image's tokens; features along each side of it
IMAGES = 2  # in a row
WIDTH, DEPTH, INNER, PATCH = 512, 6, 1536, 14  # of the tower
TEXT: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL": {
        "model_type": "qwen2_5_vl",
        "text_config": TEXT
        | {"model_type": "qwen2_5_vl_text", "rope_parameters": ROTARY | {"mrope_section": [8, 12, 12]}},
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": DEPTH,
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_heads": 8,
            "out_hidden_size": TEXT["hidden_size"],
            "patch_size": PATCH,
            "fullatt_block_indexes": [2, 5],
        },
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
    },
    "Gemma 3": {
        "model_type": "gemma3",
        "text_config": TEXT | {"model_type": "gemma3_text", "sliding_window": 256, "query_pre_attn_scalar": 64},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": DEPTH,
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_attention_heads": 8,
            "image_size": 2 * SIDE * PATCH,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
        "image_token_index": IMAGE,
        "mm_tokens_per_image": SIDE**2,
    },
}


def write_model(folder: Path, name: str) -> None:
    """Write the config.json of one of the models."""
    (folder / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")


def with_images(rows: InMemory) -> InMemory:
    """Put images into rows of random words, each between words of its own."""
    each = len(rows.samples[0]["input_ids"]) // IMAGES
    found: list[Sample] = []
    for row in rows.samples:
        ids = [IMAGE + 1 if word == IMAGE else word for word in row["input_ids"]]
        images = []
        for begin in range(1, IMAGES * each, each):
            ids[begin : begin + SIDE**2] = [IMAGE] * SIDE**2
            images.append(Image("", "", 0, 0, SIDE**2, begin, {GRIDS: [[1, 2 * SIDE, 2 * SIDE]]}))
        found.append({"input_ids": ids, "labels": list(row["labels"]), "images": images})
    return InMemory(found)


class RandomPixels(SeeingCollation):
    """What a run's loader gives of such rows, with random pixels."""

    def __init__(self, data: InMemory, sees: Sees) -> None:
        inner, nowhere = Collation(data), PictureSettings(Path())
        super().__init__(inner, nowhere, sees.inputs, sees.marks_of if sees.axes or sees.both_ways else None)
        self._sees = sees

    def carried(self, loader: Loader, batch: GlobalBatch, replica: int) -> Iterator[Carried]:
        for rows in batch.micro_batches[replica]:
            images: Sequence[torch.Tensor] = ()
            if loader.feeds_embedding:
                images = self._sees.pictures(IMAGES * len(rows), SIDE**2, torch.randn)
            yield Carried(first=tuple(images))
