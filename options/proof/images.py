"""The images of a small run: small copies of the user's first ones, seen by the model's own processor.

What the processor resizes to stays, and with it the sizes of patches and of what is pooled. Where a model takes images
of any size the copies are small, so they take few tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy
from numpy.typing import NDArray

from data.images.image import Image
from data.images.opening import pixels_of, read_file
from data.images.pictures import Pictures
from data.sample_set import IGNORED, Sample, documents
from models.checkpoint.layout import Manifest, side_files
from models.images.names import written_names
from models.images.small import whole_config
from models.spec import ModelSpec
from options.proof.samples import cut_short, joined
from training.config.keys import TrainConfig

SIDE = 64  # most pixels of a copy along a side
SEEN, IN_ONE = 12, 2  # most samples of a set with images, and most images in one of them
APART = 16  # ids at the end of a small vocabulary that stand for something, as for an image


class SmallImages:
    """Cuts samples short and gives them small copies of their images.

    Args:
        pictures: of the user's model.
        token: that stands for images in the small one.
        words: of the small vocabulary.
        folder: for the copies.
    """

    def __init__(self, pictures: Pictures, token: int, words: int, folder: Path) -> None:
        self._pictures, self._token, self._words, self._folder = pictures, token, words - APART, folder

    def shorten(self, samples: list[Sample]) -> list[Sample]:
        """Cut a set's samples short; those behind the first `SEEN` with images lose theirs."""
        left, made = SEEN, []
        for sample in samples:
            most, own = IN_ONE if left else 0, documents(sample)
            shortest = min(int(self._is_text(each).sum()) for each in own)
            made.append(joined(sample, [self._shorten(each, most, shortest) for each in own]))
            left -= "images" in made[-1]
        return made

    def _is_text(self, document: Sample) -> NDArray[numpy.bool_]:
        return numpy.asarray(document["input_ids"]) != self._pictures.image_token

    def _shorten(self, document: Sample, most: int, shortest: int) -> Sample:
        """Cut a document short; its last images come right before what is trained, with a word between two."""
        images = document.get("images", [])[-most:] if most else []
        ids, labels = numpy.asarray(document["input_ids"]), numpy.asarray(document["labels"])
        kept = self._is_text(document)
        words: Sample = {"input_ids": ids[kept].tolist(), "labels": labels[kept].tolist()}
        text, trained = cut_short(words, self._words, shortest)
        made: Sample = {"input_ids": [], "labels": []}
        placed, begin = [], 0
        for behind, image in zip(reversed(range(len(images))), images, strict=True):
            stretch, begin = slice(begin, trained - behind), trained - behind
            small = self._copy(image)
            made["input_ids"] += text["input_ids"][stretch]
            made["labels"] += text["labels"][stretch]
            placed.append(small._replace(begin=len(made["input_ids"])))
            made["input_ids"] += [self._token] * small.tokens
            made["labels"] += [IGNORED] * small.tokens
        made["input_ids"] += text["input_ids"][begin:]
        made["labels"] += text["labels"][begin:]
        return made | {"images": placed} if placed else made

    def _copy(self, image: Image) -> Image:
        picture, path = pixels_of(read_file(Path(image.path)), image.path), self._folder / f"{image.digest}.png"
        picture.thumbnail((SIDE, SIDE))
        picture.save(path)
        return self._pictures.look(path, self._folder)


def name_weights(folder: Path, spec: ModelSpec) -> None:
    """Write how transformers names a whole model's weights, as it reads an export under no other names."""
    names = written_names(whole_config(spec.raw))
    files, dtypes = {"model.safetensors": names}, dict.fromkeys(names, "F32")
    Manifest(files=files, dtypes=dtypes, side_files=side_files(folder)).write(folder)


def fit_length(config: TrainConfig, samples: list[Sample]) -> tuple[TrainConfig, list[str]]:
    """Make room for the tokens of images, with a line for the log."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    values = config.dump() | {"max_seq_len": max(config.max_seq_len, longest)}
    if config.packing:
        values["pack_len"] = 2 * values["max_seq_len"]
    seeing = [sample["images"] for sample in samples if "images" in sample]
    line = (
        f"images: in {len(seeing)} of {len(samples)} samples, at most {IN_ONE} in one and {SIDE} pixels a side before "
        "the model's own processor, right before what is trained"
    )
    return type(config).model_validate(values), [line]
