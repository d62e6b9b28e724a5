"""A small whole model of images and text with the traits of a large one.

Depths, heads and widths shrink (`models.derived.shrink`); what decides which code runs stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.config_json import TEXT
from models.derived.derive import BLOCKS
from models.derived.shrink import VISION_OUT, shrunk_fields, shrunk_vision
from models.images.eyes import TYPES, UNHEARD, whole_class
from models.images.tensors import PINPOINTS

VISION = "vision_config"
FEATURES = ("vision_feature_layer", "vision_feature_layers")
POOLED = "mm_tokens_per_image"  # Gemma's
TOKEN_TYPES = (TYPES, "token_type_ids")  # what models call 1 for image tokens and 0 for text


def small_whole(raw: Mapping[str, Any], text: PreTrainedConfig, fields: dict[str, Any]) -> Any:
    """Build transformers' whole model of a config.json, small, in fp32, with eager attention.

    Args:
        text: of the decoder, read from `fields`.
    """
    config = type_of(raw).from_dict(small_fields(raw, text, fields, BLOCKS))
    return whole_class(config)._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def small_fields(
    raw: Mapping[str, Any], text: PreTrainedConfig, fields: dict[str, Any], n_blocks: int, same_pictures: bool = False
) -> dict[str, Any]:
    """Shrink the config.json of a whole model.

    Args:
        text: of the decoder, read from `fields`.
        same_pictures: keep the sizes of images, which are then those that the model's own processor makes.
    """
    config = whole_config(raw)
    small_text = shrunk_fields(text, fields, n_blocks)
    width = type(text).from_dict(small_text).hidden_size
    # Blocks whose hidden states are the features, counted from either end.
    used = chain.from_iterable(_listed(getattr(config, name, None)) for name in FEATURES)
    own = config.vision_config.to_dict()
    small = config.to_dict() | {TEXT: small_text, VISION: shrunk_vision(own, width, max(map(abs, used)))}
    small |= dict.fromkeys(small.keys() & VISION_OUT, width)
    if same_pictures:
        small[VISION] |= {name: own[name] for name in ("image_size",) if name in own}
    else:
        if POOLED in small:
            small[POOLED] = 4
        if PINPOINTS in small:
            high, low = small[VISION]["image_size"], own["image_size"]
            small[PINPOINTS] = [(rows * high // low, columns * high // low) for rows, columns in small[PINPOINTS]]
    small |= dict.fromkeys(small.keys() & UNHEARD)

    # Tokens that stand for something lie at the end of the small vocabulary, each in a place of its own.
    last = int(small_text["vocab_size"]) - 1
    tokens = [name for name, value in small.items() if _is_token(name) and isinstance(value, int)]
    small = {name: value for name, value in small.items() if not _is_token(name)}
    return small | {name: last - place for place, name in enumerate(tokens)}


def _listed(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [value or 0]


def whole_config(raw: Mapping[str, Any]) -> Any:
    """Make transformers' config of a whole model of its config.json."""
    return type_of(raw).from_dict(dict(raw))


def type_of(raw: Mapping[str, Any]) -> Any:
    """Get transformers' class of the config of a whole model."""
    return CONFIG_MAPPING[raw["model_type"]]


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index"))


def token_types(whole: Any, ids: Tensor) -> dict[str, Tensor]:
    """Make what transformers' model has to be told of the places of images."""
    known = inspect.signature(type(whole).forward).parameters
    return {name: (ids == whole.config.image_token_id).long() for name in TOKEN_TYPES if name in known}
