"""Split a JSON stream (a list, or objects in a row) into records with little memory.

The standard library's scanner finds where each record ends; its text is handed on as bytes, to be checked and parsed
elsewhere. Comments, and commas between a value and a closing bracket, become blanks, as they cannot be misread. After
any other invalid JSON the next record cannot be found, so a complaint is the last item.

Memory: the record at hand and what was read beyond it, about 1 MB; a record over `MAX_RECORD` is given up.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import BinaryIO, Literal

CHUNK = 1 << 20  # characters read at once
MAX_RECORD = 64 << 20  # bytes or characters: what is longer is no sample but a broken file
LONGEST_TOKEN = 16  # a literal or an escape that the end of the buffer cuts is shorter

REST_IS_LOST = "what follows in this file cannot be read either"
COMMENT = re.compile(r"[\s,]*(//|/\*|#)")
EXTRA = re.compile(r"//[^\n]*|/\*.*?\*/|,(?=\s*[\]}])", re.DOTALL)
WHITE_SPACE = re.compile(r"[ \t\r\n\ufeff]*")  # and the mark that a file begins with, as files may be joined

# Only the ends of values matter here. Numbers are not made (`len` of their text is as good), and control characters in
# strings are passed over: whoever parses the record says what is wrong with it.
Kind = Literal["json", "mended", "damage"]  # mended: JSON after what was blanked
DECODER = json.JSONDecoder(strict=False, parse_int=len, parse_float=len, parse_constant=len)


def split_records(stream: BinaryIO, in_list: bool, wrapped: str = "") -> Iterator[tuple[int, Kind, bytes | str]]:
    """Yield a stream's records, numbered from 1: the bytes of the JSON, or a complaint about damage.

    Args:
        stream: of a list, from behind its opening bracket.
        in_list: whether commas separate the records and a closing bracket ends them.
        wrapped: the field of an object that holds the list, whose other fields may follow.
    """
    buffer = _Buffer(stream)
    number = 0
    while (char := buffer.peek()) and not (in_list and char == "]"):
        number += 1
        end, broken = buffer.scan()
        value = buffer.text[buffer.at : end]
        following = buffer.move(end) if not broken else ""
        if in_list and following == ",":
            buffer.at += 1
        elif following and following != "{" and not (in_list and following == "]"):
            broken = f"not JSON: expected a comma behind the record, found {following!r}"
        if char == "{" and value:
            yield number, "mended" if buffer.mended else "json", value.encode("utf-8", "surrogateescape")
            buffer.mended = False
        elif not broken:
            yield number, "damage", f"expected an object, found {char!r}"
        if broken:
            yield number, "damage", f"{broken}; {REST_IS_LOST}"
            return
    if in_list and not char:
        yield number, "damage", "not JSON: the list has no end; the file is cut off"
    elif in_list and (complaint := _behind(buffer, wrapped)):
        yield number, "damage", f"{complaint}; {REST_IS_LOST}"


def _behind(buffer: _Buffer, wrapped: str) -> str:
    """Check what follows the list, whose end is next; return the complaint."""
    following = buffer.move(buffer.at + 1)
    if wrapped and following == "}":
        following = buffer.move(buffer.at + 1)
    elif wrapped and following == ",":
        buffer.text, buffer.at = "{" + buffer.text[buffer.at + 1 :], 0
        end, broken = buffer.scan()
        if broken:
            return broken
        for name, value in DECODER.raw_decode(buffer.text)[0].items():
            if isinstance(value, list) and any(isinstance(each, dict) for each in value):
                return f"the fields '{wrapped}' and '{name}' hold records; expected one list of records in a file"
        following = buffer.move(end)
    return "not JSON: something follows the end of the list" if following else ""


class _Buffer:
    """Hold what was read and not yet used: `text` from `at` on.

    Bytes that are no UTF-8 are kept as surrogates, and become the same bytes again.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
        self.text = ""
        self.at = 0
        self.ended = False
        self.mended = False  # whether something was blanked

    def more(self) -> bool:
        """Read as much again as is left, so that a long record is not tried too often. False at the end."""
        if len(left := self.text[self.at :]) > MAX_RECORD:
            return False
        read = self.stream.read(max(len(left), CHUNK))
        self.text, self.at, self.ended = left + read, 0, not read
        return not self.ended

    def peek(self) -> str:
        """Move `at` to the next character beside white space and comments, and return it; empty at the end."""
        while True:
            self.at = WHITE_SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too
            char = self.text[self.at : self.at + 1]
            if char not in ("", "/") or not (self._mend(self.at) or self.more() or self._mend(self.at)):
                return char

    def _mend(self, at: int) -> bool:
        """Blank the comment or comma at a place, if it was read whole."""
        found = EXTRA.match(self.text, at)
        if not found or (found.end() == len(self.text) and not self.ended):
            return False
        self.text = self.text[:at] + re.sub(r"[^\n]", " ", found[0]) + self.text[found.end() :]
        self.mended = True
        return True

    def move(self, at: int) -> str:
        """Go on at another place, and peek."""
        self.at = at
        return self.peek()

    def scan(self) -> tuple[int, str]:
        """Return where the value at `at` ends and an empty text, or what is wrong with it."""
        while True:
            try:
                return DECODER.raw_decode(self.text, self.at)[1], ""
            except json.JSONDecodeError as error:
                complaint = f"not JSON: {error.msg} at character {error.pos - self.at + 1} of the record"
                before = self.text[self.at : error.pos].rstrip()
                place = error.pos
                if comment := COMMENT.match(self.text, error.pos):
                    complaint += ", a comment; expected none"
                    place = comment.start(1)
                elif before.endswith(","):  # Python complains of the bracket behind it, from 3.13 on of the comma
                    place = self.at + len(before) - 1
                if (comment or not before.endswith(("[", "{", ":"))) and self._mend(place):
                    continue
                unterminated = comment or error.msg.startswith("Unterminated string")
                if not unterminated and error.pos < len(self.text) - LONGEST_TOKEN:
                    return self.at, complaint
            except RecursionError:
                return self.at, "nested too deeply; expected fewer levels"
            if self.ended:
                return self.at, complaint
            if len(self.text) - self.at > MAX_RECORD:
                return self.at, f"longer than {MAX_RECORD / 1e6:.0f} MB; expected a shorter record"
            self.more()
