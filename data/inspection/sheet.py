"""Draw samples with images on a sheet: images beside the text that the model gets with them, trained parts in green."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import PIL.Image
from PIL import ImageDraw, ImageFont
from transformers import PreTrainedTokenizerBase

from common.terminal import reason_of
from data.errors import DataError
from data.images.opening import pixels_of, read_file
from data.inspection.inspect import Piece, folded, pieces, summary
from data.sample_set import Sample

WIDTH, THUMBNAIL, MARGIN, SIZE, LINE = 1200, 240, 20, 15, 21  # pixels
LONGEST = 4000  # characters of a sample's text
FAMILIES = ["Noto Sans CJK SC", "WenQuanYi Zen Hei", "DejaVu Sans"]  # the first that is installed; the last one always
TRAINED, CONTEXT, PAPER = (0, 128, 60), (40, 40, 40), (255, 255, 255)
# A line may end behind each of these: a Chinese character, a word, and within one that is longer than a line.
WORDS = re.compile(r"\n|[^\S\n]+|[\u2e80-\uffff]|[^\s\u2e80-\uffff]{1,60}")


class Drawn(NamedTuple):
    """Hold a word and where it stands."""

    x: float
    y: int
    text: str
    colour: tuple[int, int, int]


def draw_sheet(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, path: Path) -> int:
    """Draw the samples that have images, one below the other, as a PNG; return how many they are.

    Raises:
        DataError: an image or the sheet cannot be read or written.
    """
    from matplotlib.font_manager import FontProperties, findfont  # takes a second

    font = ImageFont.truetype(findfont(FontProperties(family=FAMILIES)), SIZE)
    seeing = [(number, sample) for number, sample in enumerate(samples, start=1) if sample.get("images")]
    strips = [_strip(summary(number, sample), sample, tokenizer, font) for number, sample in seeing]
    if not strips:
        return 0
    sheet = PIL.Image.new("RGB", (WIDTH, sum(strip.height for strip in strips)), PAPER)
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    try:
        sheet.save(path, format="PNG")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {reason_of(error)}") from None
    return len(strips)


def _strip(
    heading: str, sample: Sample, tokenizer: PreTrainedTokenizerBase, font: ImageFont.FreeTypeFont
) -> PIL.Image.Image:
    """Draw one sample: its images on the left, below each other, and its text."""
    thumbnails = [pixels_of(read_file(Path(image.path)), image.path) for image in sample["images"]]
    for thumbnail in thumbnails:
        thumbnail.thumbnail((THUMBNAIL, THUMBNAIL))
    words = list(_words(folded(pieces(sample, tokenizer)), font))
    below = max((word.y for word in words), default=0) + LINE
    height = max(below, sum(thumbnail.height + MARGIN for thumbnail in thumbnails)) + 2 * MARGIN + LINE
    strip = PIL.Image.new("RGB", (WIDTH, height), PAPER)
    pen = ImageDraw.Draw(strip)
    pen.line([(0, 0), (WIDTH, 0)], fill=CONTEXT)
    pen.text((MARGIN, MARGIN // 2), heading, fill=CONTEXT, font=font)
    top = MARGIN + LINE
    for thumbnail in thumbnails:
        strip.paste(thumbnail, (MARGIN, top))
        top += thumbnail.height + MARGIN
    for word in words:
        pen.text((word.x, word.y + MARGIN + LINE), word.text, fill=word.colour, font=font)
    return strip


def _words(whole: Sequence[Piece], font: ImageFont.FreeTypeFont) -> Iterator[Drawn]:
    """Put the words of a text into lines of the sheet's width."""
    left = THUMBNAIL + 2 * MARGIN
    x, y, shown = float(left), 0, 0
    for trained, run in groupby(whole, key=lambda piece: piece.supervised):
        text = "".join(piece.text for piece in run)
        colour = TRAINED if trained else CONTEXT
        for word in WORDS.findall(text if shown < LONGEST else ""):
            shown += len(word)
            width = 0.0 if word == "\n" else font.getlength(word)
            if word == "\n" or x + width > WIDTH - MARGIN:
                x, y = float(left), y + LINE
            if not word.isspace():
                yield Drawn(x, y, word, colour)
            x += width
