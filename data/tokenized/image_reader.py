"""Open the images of records with the model's own processor, which is loaded for the first of them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from data.errors import DataError
from data.images.beside_samples import OF_CACHE
from data.images.expansion import STRAY
from data.images.image import Image
from data.images.in_records import Look
from data.images.pictures import Pictures
from data.images.processor import IMAGE_TOKEN, image_token_of
from data.tokenized.recipe import Recipe
from data.tokenized.tokenize import Tokens


class ImageReader:
    """Look at images as a recipe's model does.

    Args:
        keep: folder for images that lie in records.

    Attributes:
        pictures: None until there was an image.
        blind: why the model sees none, once that was tried.
    """

    def __init__(self, recipe: Recipe, keep: Path) -> None:
        self._folder, self._recipe, self._keep = Path(recipe.tokenizer), recipe, keep
        self._token = image_token_of(self._folder)
        self.pictures: Pictures | None = None
        self.blind: DataError | None = None

    def looking_from(self, file: str) -> Look:
        """Return what opens the images of a data file's records, whose paths begin in its folder."""
        return partial(self._look, Path(file).parent)

    def check(self, tokens: Tokens) -> None:
        """Refuse a document without images that has the token in whose place their features go.

        Raises:
            DataError: it has.
        """
        if self._token is not None and not tokens.images and self._token in tokens.ids:
            raise DataError(STRAY.format(found=tokens.ids.count(self._token), expected=0))

    def _look(self, folder: Path, source: str | bytes) -> Image:
        if self.pictures is None:
            try:
                self.pictures = self._opened()
            except DataError as error:
                self.blind = error
                raise
        if isinstance(source, bytes):
            image = self.pictures.look(source, self._keep)
            return image._replace(path=f"{OF_CACHE}{Path(image.path).relative_to(self._keep.absolute())}")
        path = Path(os.path.abspath(folder / source))
        try:
            return self.pictures.look(path, self._keep)._replace(path=source)
        except DataError:
            if path.exists() or Path(source).is_absolute():
                raise
            raise DataError(f"{path}: no such file; expected a path from the folder of the records") from None

    def _opened(self) -> Pictures:
        if self._token is None:
            keys = " or ".join(IMAGE_TOKEN)
            raise DataError(
                f"{self._folder}/config.json: {keys}: missing; expected a model that sees this record's image"
            )
        if self._recipe.window is not None:  # a run has to know before its first step whether there is an image
            raise DataError("stream_gb: not with images in the records; expected it absent")
        return Pictures(self._folder, *self._recipe.pixels)
