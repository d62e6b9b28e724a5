"""Read the file of an image: whole, upright, three colours of 8 bits, and nothing else.

When records are read, its header says how large it is, and what is behind that is checked: the sums of a PNG's parts,
and a JPEG at an eighth of its size, which its decoder does in a fraction of the time. Its pixels are made when it is
trained on, each time anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import PIL.Image
import PIL.ImageOps
from PIL.Image import DecompressionBombError, DecompressionBombWarning, UnidentifiedImageError

from common.terminal import reason_of
from common.whole_files import read_regular
from data.errors import DataError

# Formats of pictures. Pillow reads more: PostScript by starting a program, documents, films.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
LARGEST = 2**29  # bytes of a file: no picture that Pillow decodes without a warning takes more
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)  # the tag of EXIF, and its values that swap width and height
# What in a PNG may say how it lies; Pillow finds some of it behind the pixels only, so such a file is decoded.
LIES = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
WHITE = (255, 255, 255, 255)


def read_file(path: Path) -> bytes:
    """Read the file of an image.

    Raises:
        DataError: it is missing, too large or no regular file.
    """
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise DataError(f"{path}: no usable image: {size:,} bytes; expected at most {LARGEST:,}")
        return read_regular(path)
    except OSError as error:
        raise DataError(f"{path}: no usable image: {reason_of(error)}") from None


def size_of(content: bytes, name: str) -> tuple[int, int]:
    """Return the width and height of an image as it is looked at, once its file is known to be whole.

    Raises:
        DataError: it is broken, no picture, or too large.
    """
    with _as_data_errors(name):
        image = _opened(content)
        width, height = image.size
        if image.format == "PNG" and not any(mark in content for mark in LIES):
            image.verify()
            return width, height
        if image.format in ("JPEG", "MPO"):
            lies = image.getexif().get(ORIENTATION)
            image.draft("L", (1, 1))  # an eighth of each side
            image.load()
            return (height, width) if lies in SIDEWAYS else (width, height)
        image.load()
        upright: tuple[int, int] = PIL.ImageOps.exif_transpose(image).size
        return upright


def pixels_of(content: bytes, name: str) -> PIL.Image.Image:
    """Decode an image: upright, in RGB, what is transparent on white.

    So it is the same for every version of transformers, which did otherwise before.

    Raises:
        DataError: as `size_of`.
    """
    with _as_data_errors(name):
        image = PIL.ImageOps.exif_transpose(_opened(content))
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, WHITE), image)
        return image.convert("RGB")


def _opened(content: bytes) -> PIL.Image.Image:
    """Read the header of an image, and refuse what would not become what its author sees."""
    if not content:
        raise DataError("an empty file")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DecompressionBombWarning)
        image = PIL.Image.open(BytesIO(content), formats=FORMATS)
    if image.mode.startswith(("I", "F")):
        raise DataError(f"its pixels are of kind {image.mode}; expected 8 bits for each colour")
    if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:  # that one has a small copy of itself
        raise DataError(f"{frames} frames or pages; expected a single picture")
    return image


@contextmanager
def _as_data_errors(name: str) -> Iterator[None]:
    """Put what Pillow raises, which is of many kinds, in a line that names the image."""
    try:
        yield
    except (DecompressionBombError, DecompressionBombWarning):
        reason = f"expected at most {PIL.Image.MAX_IMAGE_PIXELS or 0:,} pixels; more may fill the memory"
    except UnidentifiedImageError:
        reason = f"expected {', '.join(FORMATS)}"
    except Exception as error:
        reason = reason_of(error) or type(error).__name__
    else:
        return
    raise DataError(f"{name}: no usable image: {reason}")
