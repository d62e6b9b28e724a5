"""The tensors of images, in the forms that models' image processors give them.

Pixels of one square size; pixels and sizes; or patches, and grids of how many there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from models.derived.outline import Underivable

PIXELS, SIZES = "pixel_values", "image_sizes"
GRIDS = "image_grid_thw"  # how many patches images have along time, height and width, by transformers' name
KNOWN = (PIXELS, SIZES, GRIDS)
Sides = tuple[int, int]  # height and width of an image, in features
UNEQUAL: tuple[Sides, ...] = ((2, 5), (3, 2))
VARIOUS = inspect.Parameter.VAR_KEYWORD


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


def pictures(
    config: PreTrainedConfig,
    inputs: tuple[str, ...],
    sides: Sequence[Sides] = UNEQUAL,
    pixels: Callable[..., Tensor] = torch.randn,
) -> list[Tensor]:
    """Make the tensors of images, of these sizes where the model takes any.

    Args:
        pixels: makes them of their shape.
    """
    vision = config.vision_config.to_dict()
    channels = next(vision[name] for name in ("num_channels", "in_channels", "in_chans") if name in vision)
    patch = vision["patch_size"]
    merge = vision.get("spatial_merge_size") or getattr(config, "spatial_merge_size", 1)
    if GRIDS in inputs:
        grids = torch.tensor([[1, high * merge, wide * merge] for high, wide in sides])
        numbers = channels * vision.get("temporal_patch_size", 1) * patch**2
        return [pixels(int(grids.prod(dim=1).sum()), numbers), grids]
    if SIZES in inputs:
        sizes = torch.tensor(sides) * merge * patch
        return [pixels(len(sides), channels, *map(int, sizes.amax(dim=0))), sizes]
    size = vision["image_size"]
    return [pixels(len(sides), channels, *(size if isinstance(size, list) else [size, size]))]


def picture(pictures: list[Tensor], inputs: tuple[str, ...], number: int) -> list[Tensor]:
    """Take the tensors of one of the images."""
    rows = [1] * len(pictures[-1])
    if GRIDS in inputs:
        return [pictures[0].split(pictures[1].prod(dim=1).tolist())[number], pictures[1][number : number + 1]]
    return [each.split(rows)[number] for each in pictures]
