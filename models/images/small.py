"""A small whole model of images and text with the traits of a large one, and pictures for it.

Depths, heads and widths shrink (`models.derived.shrink`); what decides which code runs stays. The pictures are random
numbers in the form that the model's image processor gives: one square size, sizes in pixels, or grids of patches.
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
from models.derived.outline import Underivable
from models.derived.shrink import shrunk_fields, shrunk_vision
from models.images.eyes import GRIDS, TYPES, whole_class

PIXELS, SIZES = "pixel_values", "image_sizes"
KNOWN = (PIXELS, SIZES, GRIDS)
VISION = "vision_config"
FEATURES = ("vision_feature_layer", "vision_feature_layers")
POOLED = "mm_tokens_per_image"  # Gemma's
TOKEN_TYPES = (TYPES, "token_type_ids")  # what models call 1 for image tokens and 0 for text
SIDES = ((2, 5), (3, 2))  # of two images, in features
VARIOUS = inspect.Parameter.VAR_KEYWORD


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
    if same_pictures:
        small[VISION] |= {name: own[name] for name in ("image_size",) if name in own}
    elif POOLED in small:
        small[POOLED] = 4

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


def inputs_of(base: Any) -> tuple[str, ...]:
    """Name the tensors that a base model makes features of; refuse what no picture is made for here."""
    parameters = inspect.signature(base.get_image_features).parameters
    needed = [name for name, each in parameters.items() if each.default is each.empty and each.kind is not VARIOUS]
    if strange := set(needed) - set(KNOWN):
        raise Underivable(f"get_image_features takes {min(strange)}; expected no more than {', '.join(KNOWN)}")
    if GRIDS in parameters:
        return PIXELS, GRIDS
    tower = getattr(base, "vision_tower", None)
    by_size = tower is not None and SIZES in inspect.signature(tower.forward).parameters
    return (PIXELS, SIZES) if SIZES in needed or by_size else (PIXELS,)


def pictures(config: PreTrainedConfig, inputs: tuple[str, ...]) -> list[Tensor]:
    """Make the tensors of two images, of unequal sizes where the model takes any."""
    vision = config.vision_config.to_dict()
    channels = next(vision[name] for name in ("num_channels", "in_channels", "in_chans") if name in vision)
    patch = vision["patch_size"]
    merge = vision.get("spatial_merge_size") or getattr(config, "spatial_merge_size", 1)
    if GRIDS in inputs:
        grids = torch.tensor([[1, high * merge, wide * merge] for high, wide in SIDES])
        numbers = channels * vision.get("temporal_patch_size", 1) * patch**2
        return [torch.randn(int(grids.prod(dim=1).sum()), numbers), grids]
    if SIZES in inputs:
        sizes = torch.tensor(SIDES) * merge * patch
        return [torch.randn(len(SIDES), channels, *map(int, sizes.amax(dim=0))), sizes]
    size = vision["image_size"]
    return [torch.randn(len(SIDES), channels, *(size if isinstance(size, list) else [size, size]))]


def picture(pictures: list[Tensor], inputs: tuple[str, ...], number: int) -> list[Tensor]:
    """Take the tensors of one of the images."""
    rows = [1] * len(pictures[-1])
    if GRIDS in inputs:
        return [pictures[0].split(pictures[1].prod(dim=1).tolist())[number], pictures[1][number : number + 1]]
    return [each.split(rows)[number] for each in pictures]


def token_types(whole: Any, ids: Tensor) -> dict[str, Tensor]:
    """Make what transformers' model has to be told of the places of images."""
    known = inspect.signature(type(whole).forward).parameters
    return {name: (ids == whole.config.image_token_id).long() for name in TOKEN_TYPES if name in known}
