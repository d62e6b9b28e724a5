"""Put out the images of a written text: each mark becomes what the model's processor has in an image's place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from data.chat.rendered import RenderedText, without
from data.errors import DataError
from data.images.image import Image
from data.images.marks import MARK, Placed, replaced, words_in
from data.images.pictures import Pictures

STRAY = (
    "the tokens hold {found} in whose place features of images go, and its images have {expected}; expected this "
    "token's name nowhere in a text"
)


def put_out(written: RenderedText, images: Sequence[Image], picture: str, pictures: Pictures) -> RenderedText:
    """Write what stands for each image in the place of its mark; nothing of it is trained.

    Args:
        images: those that the marks are numbers of; some may have been left out.
        picture: what is written for an image, with the processor's placeholder in it.

    Raises:
        DataError: the placeholder stands elsewhere too, or images are in another order than in the record.
    """
    if written.pieces:
        raise DataError("prompt_format: gdgpt has no place for images; expected none, or another prompt_format")
    if picture.count(pictures.placeholder) != 1:
        what = f"writes {picture!r} for an image, where the processor looks for {pictures.placeholder!r}"
        raise DataError(f"the chat template {what}; expected the model's own template and processor")
    if any(pictures.placeholder in words for words in words_in(written.text)):
        raise DataError(f"a text has the word {pictures.placeholder!r}, which stands for an image; expected none")

    marks = list(MARK.finditer(written.text))
    numbers = [int(mark[1]) for mark in marks]
    if numbers != sorted(set(numbers)):
        raise DataError(f"images: in the text they stand in the order {numbers}; expected that of the record")
    there = [images[number] for number in numbers]
    if len(there) > 1 and pictures.one_only:
        raise DataError(
            f"images: {len(there)}, which the model's processor cuts up otherwise than each alone; expected 1"
        )
    pieces = [picture.replace(pictures.placeholder, pictures.expanded(image)) for image in there]
    text, loss, places = replaced(written.text, written.loss, [mark.span() for mark in marks], pieces)
    placed = [Placed(image, *place) for image, place in zip(there, places, strict=True)]
    trained = list(chain.from_iterable(without(each, places) for each in loss))
    return written._replace(text=text, loss=trained, images=tuple(placed))


def counted_images(images: Sequence[Placed], ids: Sequence[int], token: int) -> tuple[Placed, ...]:
    """Find the first token of each image, and check that it has as many as there are features of it.

    Args:
        images: with all tokens that stand for each.
        token: in whose places features go.

    Raises:
        DataError: an image has another number of them, or one is no image's.
    """
    placed = []
    for image, begin, end in images:
        places = [place for place in range(begin, end) if ids[place] == token]
        if len(places) != image.tokens:
            expected = f"expected {image.tokens}, one for each of its features"
            raise DataError(f"{image.path}: becomes {len(places)} tokens; {expected}")
        placed.append(Placed(image._replace(begin=places[0]), begin, end))
    if (found := ids.count(token)) != (expected_in_all := sum(image.tokens for image, *_ in placed)):
        raise DataError(STRAY.format(found=found, expected=expected_in_all))
    return tuple(placed)
