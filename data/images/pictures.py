"""See images as a model does: how many tokens each takes, the text that stands for it, and its pixels.

How an image is cut up depends on its size alone, so the processor is asked once for each size, with a blank image, and
no pixels are decoded for what is only counted. Nothing here imports torch: who tokenizes records does without it.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import PIL.Image
from numpy.typing import NDArray

from common.terminal import reason_of
from data.errors import DataError
from data.images.image import Image
from data.images.opening import pixels_of, read_file, size_of
from data.images.processor import IMAGE_TOKEN, image_token_of, load_processor

if TYPE_CHECKING:
    from torch import Tensor

DIGITS = 16  # of a digest
MOST_NUMBERS = 16  # of an image that a sample keeps: more are of its patches, and are made again with the pixels
Arrays = dict[str, NDArray[Any]]


class Expansion(NamedTuple):
    """Hold what an image of some size becomes.

    Attributes:
        text: which stands for it.
        tokens: of it that its features take.
        shape: see `Image`.
    """

    text: str
    tokens: int
    shape: dict[str, Any]


class Pictures:
    """See images by the processor of a model folder.

    Args:
        min_pixels, max_pixels: between which images are resized; None leaves it to the processor.

    Attributes:
        placeholder: what a chat template writes for one image.
        image_token: whose places features take.
        one_only: whether the model sees several images of a record otherwise than each alone.

    Raises:
        DataError: the folder has no processor of images, or one that cannot resize as is asked.
    """

    def __init__(self, folder: Path, min_pixels: int | None = None, max_pixels: int | None = None) -> None:
        self.folder = folder
        self._processor = load_processor(folder)
        self._resize(min_pixels, max_pixels)
        self.placeholder = str(self._processor.image_token)
        self.one_only = "batch_num_images" in self._processor.image_processor.model_input_names  # LLaVA-OneVision's
        if (token := image_token_of(folder)) is None:
            raise DataError(f"{folder / 'config.json'}: no {IMAGE_TOKEN[0]}; expected a model of images and text")
        self.image_token = token
        self._known: dict[tuple[int, int], Expansion] = {}

    def look(self, source: Path | bytes, keep: Path) -> Image:
        """Check an image, and say what it takes; its place in the sample is left at 0.

        Args:
            keep: where one that comes as bytes is written, named by its digest.

        Raises:
            DataError: it is missing, broken, too large, no picture, or of a shape that the model does not take.
        """
        path = source.absolute() if isinstance(source, Path) else None
        content = source if isinstance(source, bytes) else read_file(source)
        digest = _digest(content)
        name = str(path or f"an image of {len(content):,} bytes")
        width, height = size_of(content, name)
        expansion = self._expansion(width, height, name)
        place = str(path or _kept(content, digest, keep))
        return Image(place, digest, width, height, expansion.tokens, shape=expansion.shape)

    def expanded(self, image: Image) -> str:
        """Return the text that stands for an image, in the place of the placeholder."""
        return self._expansion(image.width, image.height, image.path).text

    def arrays(self, images: Sequence[Image]) -> Arrays:
        """Decode images, and make all that the processor gives of them, in their order.

        Raises:
            DataError: one is missing, or not the one that was looked at.
        """
        return self._process([_decoded(image) for image in images])

    def tensors(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """Make the tensors of `arrays`."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.arrays(images).items()}

    def _expansion(self, width: int, height: int, name: str) -> Expansion:
        """Ask the processor what becomes of images of a size; it is remembered."""
        known = self._known.get((width, height))
        if known is None:
            try:
                known = self._known[width, height] = self._of_blank(width, height)
            except Exception as error:  # processors have their own limits, and raise many kinds
                what = f"{name}: the model takes no image of {width} x {height} pixels"
                raise DataError(f"{what}: {reason_of(error)}") from None
        return known

    def _of_blank(self, width: int, height: int) -> Expansion:
        """Process a blank image in the cheapest way that gives its shape."""
        blank = PIL.Image.new("RGB", (width, height))
        cheap = {"do_rescale": False, "do_normalize": False, "resample": PIL.Image.Resampling.NEAREST}
        made = self._call([blank], images_kwargs=cheap, return_text_replacement_offsets=True)
        ((placed,),) = made["text_replacement_offsets"]
        tokens = int((numpy.asarray(made["input_ids"]) == self.image_token).sum())
        if not tokens:
            raise DataError(f"no token {self.image_token}, the model's image_token_id, in {placed['replacement']!r}")
        beside = {name: array for name, array in _of_images(made).items() if array.size <= MOST_NUMBERS}
        shape = {name: array.tolist() for name, array in beside.items() if not name.startswith("pixel")}
        return Expansion(placed["replacement"], tokens, shape)

    def _process(self, pictures: list[PIL.Image.Image]) -> Arrays:
        return _of_images(self._call(pictures))

    def _call(self, pictures: list[PIL.Image.Image], **options: Any) -> Any:
        text = [self.placeholder * len(pictures)]
        return self._processor(images=pictures, text=text, return_tensors="np", **options)

    def _resize(self, least: int | None, most: int | None) -> None:
        """Change the sizes that the processor resizes to, where it takes images of any size."""
        if least is most is None:
            return
        images = self._processor.image_processor
        size = dict(images.size or {})
        given = {name: size.get(name) for name in ("shortest_edge", "longest_edge") if size.get(name)}
        by_area = "min_pixels" in getattr(images.valid_kwargs, "__annotations__", {})
        by_side = set(given) == {"longest_edge"} and not by_area
        if not by_area and not (by_side and least is None):
            key = "max_pixels" if least is None else "min_pixels"
            name = type(images).__name__.removesuffix("Pil")
            raise DataError(
                f"vision.{key}: {name} resizes to what its own settings say ({_words(size)}) and takes no other number "
                "of pixels; expected this key to be absent"
            )

        side = math.isqrt(most or 0)  # of a square with as many pixels
        asked = {"shortest_edge": least, "longest_edge": most} if by_area else {"longest_edge": side}
        given |= {name: value for name, value in asked.items() if value}
        shortest, longest = (int(given.get(name) or 0) for name in ("shortest_edge", "longest_edge"))
        if shortest > longest:
            key, asked_for, other, own = ("max_pixels", longest, "min_pixels", shortest)
            if most is None:
                key, asked_for, other, own = ("min_pixels", shortest, "max_pixels", longest)
            raise DataError(
                f"vision.{key}: {asked_for:,}, and the processor's {other} is {own:,}; expected both to fit"
            )
        images.size = type(images.size)(**given)


def _of_images(made: Any) -> Arrays:
    """Take what a processor gives of images, without what it gives of text."""
    text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
    return {name: numpy.ascontiguousarray(value) for name, value in made.items() if name not in text}


def _decoded(image: Image) -> PIL.Image.Image:
    """Decode an image that was looked at, and no other that took its place."""
    content = read_file(Path(image.path))
    if _digest(content) != image.digest:
        raise DataError(f"{image.path}: this image was changed since the records were read; expected the same file")
    return pixels_of(content, image.path)


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:DIGITS]


def _kept(content: bytes, digest: str, folder: Path) -> Path:
    """Write an image that has no file of its own, unless it is there; return its path.

    It is not waited for until the disk has it, which would take longer than all else: whoever reads it compares the
    digest.
    """
    path = folder.absolute() / digest[:2] / digest
    try:
        if path.is_file() and path.read_bytes() == content:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{digest}.{secrets.token_hex(4)}")
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {reason_of(error)}") from None
    return path


def _words(size: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in size.items() if value) or "any size"
