"""Files that are no usable image, each in one line; and those that are, upright and in three colours."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy
import PIL.Image
import pytest

from data.errors import DataError
from data.images.opening import LARGEST, pixels_of, read_file, size_of

NOISE = numpy.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=numpy.uint8)


def written(image: PIL.Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(kind: str, **options: object) -> bytes:
    return written(PIL.Image.fromarray(NOISE), kind, **options)


def bomb() -> bytes:
    """A PNG of a few bytes whose header says that it has 60,000 x 60,000 pixels."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "half a PNG": (lambda: noise("PNG")[:4000], "no usable image: "),
    "a PNG without its last bytes": (lambda: noise("PNG")[:-6], "no usable image: "),
    "a PNG with a changed byte": (lambda: noise("PNG").replace(b"IDAT", b"IDAU"), "no usable image: "),
    "half a JPEG": (lambda: noise("JPEG")[:1500], "no usable image: image file is truncated"),
    "a JPEG without its last bytes": (lambda: noise("JPEG", quality=95)[:-400], "image file is truncated"),
    "half a WebP": (lambda: noise("WEBP")[:1000], "no usable image: "),
    "half a GIF": (lambda: noise("GIF")[:2000], "no usable image: "),
    "half a BMP": (lambda: noise("BMP")[:5000], "no usable image: image file is truncated"),
    "half a TIFF": (lambda: noise("TIFF")[:5000], "no usable image: "),
    "text": (lambda: b"not found: 404", "expected PNG, JPEG, WEBP, GIF, BMP, TIFF"),
    "a page": (lambda: b"<!DOCTYPE html><html></html>", "expected PNG, JPEG"),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n", "expected PNG, JPEG"),
    "nothing": (lambda: b"", "no usable image: an empty file"),
    "zeros": (lambda: bytes(3000), "expected PNG, JPEG"),
    "a bomb": (bomb, "expected at most 89,478,485 pixels; more may fill the memory"),
    "16 bits": (
        lambda: written(PIL.Image.fromarray(NOISE[:, :, 0].astype(numpy.uint16) * 256), "PNG"),
        "its pixels are of kind I;16; expected 8 bits for each colour",
    ),
    "a film": (
        lambda: noise(
            "GIF", save_all=True, append_images=[PIL.Image.fromarray(NOISE[::-1]), PIL.Image.fromarray(NOISE // 2)]
        ),
        "3 frames or pages; expected a single picture",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_usable_image_is_said_in_one_line(name: str) -> None:
    content, said = BAD[name]
    with pytest.raises(DataError) as error:
        size_of(content(), "a.png")
    (line,) = str(error.value).splitlines()
    assert line.startswith("a.png: no usable image: ")
    assert said in line
    assert "object at 0x" not in line
    if name != "a PNG without its last bytes":  # which has all its pixels
        with pytest.raises(DataError):
            pixels_of(content(), "a.png")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "expected a regular file"),
        (os.mkfifo, "expected a regular file"),
        (lambda path: path.symlink_to(path.with_name("gone")), "No such file or directory"),
        (lambda path: path.touch(), ""),
    ],
)
def test_a_file_that_cannot_be_read_is_said_in_one_line(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    path = tmp_path / "a.png"
    make(path)
    if not said:
        assert read_file(path) == b""
        return
    with pytest.raises(DataError) as error:
        read_file(path)
    assert str(error.value).startswith(f"{path}: no usable image: ")
    assert said in str(error.value)


def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.bmp"
    with open(path, "wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(DataError, match=r"536,870,913 bytes; expected at most 536,870,912"):
        read_file(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_and_pixels_are_those_of_an_upright_image(kind: str, orientation: int) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    content = noise(kind, exif=exif) if kind != "BMP" else noise(kind)
    made = pixels_of(content, "a")
    assert size_of(content, "a") == made.size
    turned = orientation >= 5 and kind != "BMP"
    assert made.size == ((60, 90) if turned else (90, 60))
    if kind == "PNG":
        assert numpy.array_equal(numpy.sort(numpy.asarray(made), axis=None), numpy.sort(NOISE, axis=None))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_kind_of_colour_becomes_three(mode: str) -> None:
    content = written(PIL.Image.fromarray(NOISE).convert(mode), "TIFF" if mode == "CMYK" else "PNG")
    assert size_of(content, "a") == (90, 60)
    assert pixels_of(content, "a").mode == "RGB"
    if mode in ("RGB", "RGBA"):
        assert numpy.array_equal(numpy.asarray(pixels_of(content, "a")), NOISE)


def test_what_is_transparent_is_white() -> None:
    image = PIL.Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    assert numpy.asarray(pixels_of(written(image, "PNG"), "a")).min() == 255
    shown = PIL.Image.new("P", (4, 4), 0)
    shown.putpalette([10, 20, 30])
    assert numpy.asarray(pixels_of(written(shown, "GIF", transparency=0), "a")).min() == 255


def test_a_photo_of_a_phone_with_a_preview_in_it_is_one_picture() -> None:
    content = written(PIL.Image.fromarray(NOISE), "MPO", save_all=True, append_images=[PIL.Image.fromarray(NOISE[::2])])
    assert size_of(content, "a") == (90, 60)
    assert pixels_of(content, "a").size == (90, 60)
