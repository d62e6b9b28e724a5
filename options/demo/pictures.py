"""See the images of questions as the model does: by its own processor, at the sizes that it was trained with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor

from data.chat.messages import Said
from data.errors import DataError
from data.images.expansion import STRAY
from data.images.image import Image
from data.images.in_records import PLACEHOLDER, Look, take_images
from data.images.marks import numbers_in
from data.images.pictures import Pictures
from data.settings import Pixels
from options.images.keys import KEY

if TYPE_CHECKING:
    from models.sees import Sees

LIMITS = ("min_pixels", "max_pixels")  # in the section of a config, as `Pixels` has them


class DemoPictures:
    """Looks at images for one model.

    Args:
        folder: of the model, with its processor.
        sees: what the model takes of images.

    Attributes:
        own: the model's processor.

    Raises:
        DataError: the folder has no usable processor.
    """

    def __init__(self, folder: Path, pixels: Pixels, sees: Sees) -> None:
        self.own = Pictures(folder, *pixels)
        self._inputs = sees.inputs
        self._kept = TemporaryDirectory(prefix="pipetune-images-")  # of images that are no files

    def looking_from(self, folder: Path) -> Look:
        """Return what opens images whose paths begin in a folder."""
        return partial(self._look, folder)

    def _look(self, folder: Path, source: str | bytes) -> Image:
        place = source if isinstance(source, bytes) else Path(os.path.abspath(folder / source))
        return self.own.look(place, Path(self._kept.name))

    def tensors(self, images: Sequence[Image]) -> list[Tensor]:
        """Make what the embedding takes of some images; nothing of none."""
        made = self.own.tensors(images) if images else {}
        return [made[name] for name in self._inputs if images]


def illustrated(text: str, paths: Sequence[str], look: Look) -> tuple[str, tuple[Image, ...]]:
    """Put images where a question says `<image>`, or else in front of it: a text with marks, and the images.

    Raises:
        DataError: one cannot be used, or there are more or fewer than places.
    """
    placed = text if PLACEHOLDER in text else PLACEHOLDER * len(paths) + text
    try:
        marked, images = take_images({"prompt": placed, "images": list(paths)}, look)
    except ValueError as error:
        raise DataError(f"--image: {error}") from None
    return marked["prompt"], images


def check_places(ids: list[int], sees: Sees | None, images: Sequence[Image] = ()) -> list[int]:
    """Return a prompt, if it has as many places as its images have features.

    Raises:
        DataError: it has not.
    """
    expected = sum(image.tokens for image in images)
    if sees and (found := ids.count(sees.image_token)) != expected:
        raise DataError(STRAY.format(found=found, expected=expected))
    return ids


def shown(said: Sequence[Said], images: Sequence[Image]) -> list[Image]:
    """List the images of messages, in the order of their marks."""
    return [images[number] for number in chain.from_iterable(numbers_in(each.text) for each in said)]


def trained_pixels(config: dict[str, Any], notify: Callable[[str], None]) -> Pixels:
    """Return between which sizes a run, by its config, resized images; as the model's processor does, if by none."""
    limits = {name: config[KEY][name] for name in LIMITS if config.get(KEY, {}).get(name)}
    if limits:
        notify(f"images as in training: {', '.join(f'{name}: {each}' for name, each in limits.items())}")
    return Pixels(*(limits.get(name) for name in LIMITS))
