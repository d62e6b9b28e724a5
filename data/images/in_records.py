"""Take the images out of a record, whatever its layout; marks say where they stood (`data.images.marks`).

An image stands where its part is (`{"type": "image", ...}`), or where a text says `<image>`; what a part does not have
itself it takes from the record's own images, as each `<image>` does, in their order. A record without images is left as
it is.

Cost: three microseconds for a record without images.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from pydantic import BaseModel
from pydantic_core import from_json

from common.quantities import counted
from data.errors import DataError
from data.images.image import Image
from data.images.marks import IMAGE, mark_of

Look = Callable[[str | bytes], Image]  # opens a file, named as a record does, or its bytes

NAMES = ("images", "image", "image_paths", "image_path")  # fields with the images of a record
PLACEHOLDER = "<image>"
PARTS = ("image", "image_url", "input_image")  # types of parts
SOURCES = ("image", "image_url", "path", "url", "bytes", "source")  # where a part, or an entry of a list, has its image
OF_A_PART = {"type", "text", "detail", "index", *SOURCES}
NO_WORDS = frozenset("tools tool_calls function_call functions id source url".split())  # fields without a dialogue
LONGEST_PATH = 4096
UNSEEN = "expected records without images, as nothing here opens any"


class Illustrated(BaseModel):
    """Hold the images of a record; each mark in its texts is the number of one."""

    images: tuple[Image, ...] = ()


def take_images(fields: dict[str, Any], look: Look | None) -> tuple[dict[str, Any], tuple[Image, ...]]:
    """Return a record's fields with marks for its images, and these.

    Args:
        look: opens an image; without it there may be none.

    Raises:
        ValueError: an image is missing, cannot be used or has no place; a DataError where the file is to blame.
    """
    named = [name for name in NAMES if name in fields]
    there = _with_images(fields)
    rest = {name: _parsed(value) for name, value in fields.items() if name not in NAMES}
    parts = next(_parts(rest), None)
    if not there and parts is None:
        return {name: fields[name] for name in rest} if named else fields, ()

    if len(there) > 1:
        raise ValueError(f"{there[0]}: expected it alone, found {there[1]} beside it")
    beside = _listed(fields[there[0]]) if there else []
    taking = _Taking(beside, in_texts=parts is None)
    marked = taking.marked(rest)
    if taking.used != len(beside):
        places = counted(taking.used, "place")
        raise ValueError(
            f"{there[0] if there else 'images'}: {counted(len(beside), 'image')}, but {places} for them ({PLACEHOLDER} "
            "in a text, or a part of type image); expected as many"
        )
    if look is None:
        raise ValueError(f"{there[0] if there else 'content'}: {UNSEEN}")
    return marked, tuple([_opened(look, number, source) for number, source in enumerate(taking.found, start=1)])


def has_images(fields: Mapping[str, Any]) -> bool:
    """Return whether a record's fields name images, as they are or as parts of messages."""
    return bool(_with_images(fields)) or next(_parts(fields), None) is not None


def _with_images(fields: Mapping[str, Any]) -> list[str]:
    """List the fields with the images of a record."""
    return [name for name in NAMES if fields.get(name) not in (None, "", b"", [], {})]


def _opened(look: Look, number: int, given: Any) -> Image:
    try:
        return look(_source(given))
    except (DataError, ValueError) as error:
        raise DataError(f"image {number}: {error}") from None


def _parsed(value: Any) -> Any:
    """Read messages that are JSON, as a table has them, where they may hold images."""
    if isinstance(value, str) and value.startswith("[") and any(f'"{kind}"' in value for kind in PARTS):
        try:
            return from_json(value, allow_inf_nan=False)
        except ValueError:
            return value  # whoever reads the layout says what is wrong
    return value


def _listed(images: Any) -> list[Any]:
    """Return the images of a field, one or several, also as JSON."""
    if isinstance(images, str) and images.startswith("["):
        try:
            images = from_json(images)
        except ValueError:
            raise ValueError("images: expected a path, a list or the JSON of one") from None
    return images if isinstance(images, list) else [images]


def _parts(fields: Mapping[str, Any]) -> Iterator[Any]:
    """Return the parts with images in all messages of a record."""
    for name, messages in fields.items():
        if name in NO_WORDS or not isinstance(messages, (list, dict)):
            continue
        for message in messages if isinstance(messages, list) else [messages]:
            contents = message.get("content", message.get("value")) if isinstance(message, dict) else None
            if isinstance(contents, (list, dict)):
                yield from filter(_is_part, contents if isinstance(contents, list) else [contents])


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in PARTS


class _Taking:
    """Put marks into a record.

    Args:
        beside: the images that the record has beside its texts.
        in_texts: whether a text has places for them.
    """

    def __init__(self, beside: list[Any], in_texts: bool) -> None:
        self._beside = beside
        self._in_texts = in_texts
        self.used = 0  # places that took, or would take, one of these
        self.found: list[Any] = []  # the images in the order of their places

    def marked(self, value: Any) -> Any:
        """Return a part of the record with marks."""
        if isinstance(value, str):
            if IMAGE in value:
                raise DataError(f"a text has the character {IMAGE!a}, which no text may hold; expected none")
            pieces = value.split(PLACEHOLDER) if self._in_texts else [value]
            return pieces[0] + "".join([self._next() + piece for piece in pieces[1:]])
        if isinstance(value, list):
            return [self.marked(each) for each in value]
        if not isinstance(value, dict):
            return value
        if _is_part(value) and not self._in_texts:
            return {"type": "text", "text": self._of_part(value)}
        return {name: each if name in NO_WORDS else self.marked(each) for name, each in value.items()}

    def _of_part(self, part: dict[str, Any]) -> str:
        part = {name: value for name, value in part.items() if value not in (None, "")}
        if unknown := sorted(part.keys() - OF_A_PART):
            raise ValueError(f"content: a part of type {part['type']} has {unknown[0]!r:.40}, which is not used")
        if part.keys() & {*SOURCES}:
            return self._mark(part)
        if part.get("index", self.used) != self.used:
            raise ValueError(f"content: a part has the index {part['index']!r:.20}; expected {self.used}, in order")
        return self._next()

    def _next(self) -> str:
        self.used += 1
        return self._mark(self._beside[self.used - 1] if self.used <= len(self._beside) else None)

    def _mark(self, source: Any) -> str:
        self.found.append(source)
        return mark_of(len(self.found) - 1)


def _source(given: Any) -> str | bytes:
    """Return the path or the bytes of an image, as a record names it.

    Raises:
        ValueError: it is neither, or lies in the network.
    """
    if isinstance(given, dict):
        if isinstance(data := given.get("data"), str):  # Anthropic's
            return _from_base64(data, "data")
        values = (given[name] for name in ("bytes", *SOURCES) if given.get(name))
        return _source(next(values, None))
    if isinstance(given, (bytes, bytearray)):
        return bytes(given)
    if not isinstance(given, str) or "\0" in given:
        raise ValueError(f"expected a path, a data URI or the bytes of a file, found {given!r:.40}")
    if given.startswith(("http://", "https://")):
        raise ValueError(f"{given:.80}: expected a file, as nothing is fetched from the network while a model trains")
    if given.startswith("data:"):
        head, _, data = given.partition(",")
        return _from_base64(data, head) if head.endswith(";base64") else unquote_to_bytes(data)
    if len(given) > LONGEST_PATH:
        raise ValueError(f"{given:.40}...: {len(given):,} characters; expected a path or a data URI")
    return unquote(urlsplit(given).path) if given.startswith("file://") else given


def _from_base64(data: str, name: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{name:.80}: no base64: {error}") from None
