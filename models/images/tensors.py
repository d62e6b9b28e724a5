"""The tensors of images, in the forms that models' image processors give them.

A form is declared by the tensors that a model makes features of. Which one a model has is read from the parameters of
its `get_image_features`; a tensor of which none knows is refused by name.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from models.derived.outline import Underivable

PIXELS, SIZES = "pixel_values", "image_sizes"
GRIDS = "image_grid_thw"  # how many patches images have along time, height and width, by transformers' name
PLACES = "image_position_ids"  # of patches in their image
MASK = "pixel_attention_mask"  # where pixels are, and no padding
PATCHES = "spatial_shapes"  # how many patches images have along height and width
COUNTS = "batch_num_images"  # images of each text: several are cut up otherwise than one alone
PINPOINTS = "image_grid_pinpoints"  # of config.json: the sizes that an image may be cut up into
# Parameters that say how features are made, not of what; their defaults are those of config.json.
SETTINGS = {"vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "downsample_mode"}
SETTINGS |= {"interpolate_pos_encoding", COUNTS, "output_hidden_states", "output_attentions", "return_dict"}
FEATURES = "get_image_features"
Sides = tuple[int, int]  # height and width of an image, in features
Pixels = Callable[..., Tensor]  # makes pixels of a shape
UNEQUAL: tuple[Sides, ...] = ((2, 5), (3, 2))


class TowerSizes:
    """What a config says of a tower's patches and images."""

    def __init__(self, config: PreTrainedConfig) -> None:
        vision = config.vision_config.to_dict()
        known = config.to_dict() | vision

        def first(names: Sequence[str], otherwise: int) -> int:
            return next((known[name] for name in names if known.get(name)), otherwise)

        self.merge = first(("spatial_merge_size", "pooling_kernel_size", "downsample_factor"), 1)
        self.channels = first(("num_channels", "in_channels", "in_chans"), 3)
        self.patch, self.size = vision.get("patch_size"), vision.get("image_size")
        self.numbers = self.channels * vision.get("temporal_patch_size", 1)  # of a patch, for each of its pixels
        self.pinpoints: list[Sides] = getattr(config, PINPOINTS, None) or []

    def square(self) -> list[int]:
        """Return height and width of all images, or parts of them, in pixels."""
        return self.size if isinstance(self.size, list) else [self.size, self.size]


class PictureForm(ABC):
    """How a model takes images.

    Attributes:
        names: its tensors, in order; the first has the pixels.
    """

    names: ClassVar[tuple[str, ...]]

    @staticmethod
    def fits(tower: TowerSizes) -> bool:
        """Return whether a model of these tensors has this form, where several have the same."""
        return True

    @staticmethod
    @abstractmethod
    def made(tower: TowerSizes, sides: Sequence[Sides], pixels: Pixels) -> list[Tensor]:
        """Make the tensors of images, of these sizes where the model takes any."""

    @staticmethod
    def one(images: list[Tensor], number: int) -> list[Tensor]:
        """Take the tensors of one of the images."""
        return [each[number : number + 1] for each in images]


class Squares(PictureForm):
    """Images, or parts of which an image has several, of one size."""

    names = (PIXELS,)

    @staticmethod
    def made(tower: TowerSizes, sides: Sequence[Sides], pixels: Pixels) -> list[Tensor]:
        return [pixels(len(sides), tower.channels, *tower.square())]


class AnySize(PictureForm):
    """Images of their own sizes, padded to the largest."""

    names = (PIXELS, SIZES)

    @staticmethod
    def fits(tower: TowerSizes) -> bool:
        return not tower.pinpoints

    @staticmethod
    def made(tower: TowerSizes, sides: Sequence[Sides], pixels: Pixels) -> list[Tensor]:
        sizes = torch.tensor(sides) * tower.merge * tower.patch
        return [pixels(len(sides), tower.channels, *map(int, sizes.amax(dim=0))), sizes]


class CutUp(PictureForm):
    """Images, each as a whole and in the parts that its size is cut up into, padded to the most parts."""

    names = (PIXELS, SIZES)

    @staticmethod
    def fits(tower: TowerSizes) -> bool:
        return bool(tower.pinpoints)

    @staticmethod
    def made(tower: TowerSizes, sides: Sequence[Sides], pixels: Pixels) -> list[Tensor]:
        high, wide = tower.square()
        most = 1 + max((rows // high) * (columns // wide) for rows, columns in tower.pinpoints)
        sizes = torch.tensor(sides) * tower.patch * 3  # between the sizes that they are cut up into
        return [pixels(len(sides), most, tower.channels, high, wide), sizes]


class InRows(PictureForm):
    """The parts of a text's images, of one size, with a mask of their pixels; all of an image are in one row here."""

    names = (PIXELS, MASK)

    @staticmethod
    def made(tower: TowerSizes, sides: Sequence[Sides], pixels: Pixels) -> list[Tensor]:
        square = tower.square()
        return [pixels(len(sides), 1, tower.channels, *square), torch.ones(len(sides), 1, *square, dtype=torch.bool)]


class Grids(PictureForm):
    """Patches of all images end to end, and grids of how many each has."""

    names = (PIXELS, GRIDS)

    @staticmethod
    def made(tower: TowerSizes, sides: Sequence[Sides], pixels: Pixels) -> list[Tensor]:
        grids = torch.tensor([[1, high * tower.merge, wide * tower.merge] for high, wide in sides])
        return [pixels(int(grids.prod(dim=1).sum()), tower.numbers * tower.patch**2), grids]

    @staticmethod
    def one(images: list[Tensor], number: int) -> list[Tensor]:
        patches = images[0].split(images[1].prod(dim=1).tolist())[number]
        return [patches, images[1][number : number + 1]]


class PlacedPatches(PictureForm):
    """Patches of each image, padded to the most, with where each one lies: across and down, -1 for padding."""

    names = (PIXELS, PLACES)

    @staticmethod
    def made(tower: TowerSizes, sides: Sequence[Sides], pixels: Pixels) -> list[Tensor]:
        places = []
        for high, wide in sides:
            down, across = (torch.arange(each * tower.merge) for each in (high, wide))
            places.append(torch.cartesian_prod(down, across).flip(-1))
        padded = pad_sequence(places, batch_first=True, padding_value=-1)
        return [pixels(*padded.shape[:2], tower.numbers * tower.patch**2), padded]


class Padded(PictureForm):
    """Patches of each image, padded to the most, with how many there are down and across, and a mask."""

    names = (PIXELS, PATCHES, MASK)

    @staticmethod
    def made(tower: TowerSizes, sides: Sequence[Sides], pixels: Pixels) -> list[Tensor]:
        shapes = torch.tensor(sides) * tower.merge
        counts = shapes.prod(dim=1)
        mask = torch.arange(int(counts.max())) < counts[:, None]
        return [pixels(*mask.shape, tower.numbers * tower.patch**2), shapes, mask.long()]


FORMS = (Squares, AnySize, CutUp, InRows, Grids, PlacedPatches, Padded)
KNOWN = set(chain.from_iterable(form.names for form in FORMS))


def inputs_of(base: Any) -> tuple[str, ...]:
    """Name the tensors that a base model makes features of; refuse what no form has."""
    parameters = inspect.signature(base.get_image_features).parameters
    taken = [name for name, each in parameters.items() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    if strange := [name for name in taken if name not in KNOWN | SETTINGS]:
        raise Underivable(f"{FEATURES} takes {strange[0]}; expected no more than {', '.join(sorted(KNOWN))}")

    names = [name for name in taken if name in KNOWN]
    tower = getattr(base, "vision_tower", None)
    by_size = tower is not None and SIZES in inspect.signature(tower.forward).parameters
    if by_size and SIZES not in names:  # handed on by LLaVA, in older releases without a name
        names.append(SIZES)
    if SIZES in names and not by_size and parameters[SIZES].default is None:  # which most of its towers do not take
        names.remove(SIZES)
    form = next((each for each in FORMS if set(each.names) == set(names)), None)
    if form is None:
        raise Underivable(f"{FEATURES} takes {' and '.join(names)}, which are together in no form that is known here")
    return form.names


def form_of(config: PreTrainedConfig, inputs: tuple[str, ...]) -> type[PictureForm]:
    """Find the form of a model's images by its tensors."""
    tower = TowerSizes(config)
    return next(each for each in FORMS if each.names == inputs and each.fits(tower))


def pictures(
    config: PreTrainedConfig,
    inputs: tuple[str, ...],
    sides: Sequence[Sides] = UNEQUAL,
    pixels: Pixels = torch.randn,
) -> list[Tensor]:
    """Make the tensors of images, of these sizes where the model takes any.

    Args:
        pixels: makes them of their shape.
    """
    return form_of(config, inputs).made(TowerSizes(config), sides, pixels)
