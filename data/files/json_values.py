"""Cuts a stream of JSON, a list or objects one after the other, into its records without holding it in memory.

The standard library's scanner finds where each record ends; its text is handed on as bytes, to be checked and parsed
elsewhere. A library that streams JSON stops at the first thing that is wrong. Here the rest of a damaged file is still
read: records of one file begin alike (`{"instruction":`), so the next record is looked for by such a beginning.

Memory: the record at hand and what was read beyond it, about 1 MiB; a record over `MAX_RECORD` is given up.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator

MAX_RECORD = 64 << 20  # bytes or characters: what is longer is no sample but a broken file
MAX_OPENINGS = 16
LONGEST_TOKEN = 16  # a literal or an escape that the end of the buffer cuts is shorter

WHITE_SPACE = re.compile(r"[ \t\r\n]*")
OPENING = re.compile(r'\{\s*"(?:[^"\\]|\\.){0,100}"')
ANY_OPENING = r'\{\s*"'
FIELD = re.compile(r'"\s*:\s*(\[\s*)?$')  # what stands before a field's value, or before the first entry of its list
FIELD_REACH = 200  # characters of it, white space included

# Only the ends of values matter here. Numbers are not made (`len` of their text is as good), and control characters in
# strings are passed over: whoever parses the record says what is wrong with it.
DECODER = json.JSONDecoder(strict=False, parse_int=len, parse_float=len, parse_constant=len)


def split(chunks: Iterable[bytes], in_list: bool, wrapped: bool = False) -> Iterator[tuple[int, bytes | str]]:
    """The records of a stream, numbered from 1: each as the bytes of its JSON, or as a complaint where it is broken.

    Args:
        chunks: of the stream; of a list, from behind its opening bracket.
        in_list: whether commas separate the records and a closing bracket ends them.
        wrapped: whether something may follow the bracket: the list is the field of an object.
    """
    buffer = _Buffer(chunks)
    openings: dict[str, None] = {}
    certain = True  # that a record begins here, and not an object inside a broken one
    closed = not in_list
    number = 0
    while char := buffer.peek():
        if in_list and char == "]":
            closed = True
            following = buffer.move(buffer.at + 1)
            end_expected = not following or (wrapped and following in ",}")
            certain = buffer.recover(openings, guess=not openings)
            if not end_expected or buffer.peek():
                yield number, "not JSON: something follows the end of the list"
            continue
        number += 1
        # Nothing but an object is a record; a string that has lost its beginning would swallow that of the next one.
        end, complaint = buffer.scan() if char == "{" else (0, f"expected an object, found {char!r}")
        if not complaint:
            value = buffer.text[buffer.at : end]
            following = buffer.move(end)
            if in_list and following == ",":
                buffer.at += 1
            elif following and following != "{" and not (in_list and following == "]"):
                complaint = f"not JSON: expected a comma behind the record, found {following!r}"
            yield number, value.encode("utf-8", "surrogateescape")
            if certain and len(openings) < MAX_OPENINGS and (opening := OPENING.match(value)):
                openings[opening.group()] = None
        if complaint:
            yield number, complaint
            own = OPENING.match(buffer.text, buffer.at) if certain else None
            buffer.at += 1
            certain = buffer.recover([*openings, *([own.group()] if own else [])], guess=not openings)
            closed |= buffer.at == len(buffer.text)  # nothing is left: that the list has no end goes without saying
    if not closed:
        yield number, "not JSON: the list has no end; the file is cut off"


class _Buffer:
    """What was read and not yet used: `text` from `at` on.

    Bytes that are no UTF-8 are kept as surrogates, and become the same bytes again.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.chunks = iter(chunks)
        self.decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.text = ""
        self.at = 0
        self.ended = False

    def more(self) -> bool:
        """Read as much again as is left, so that a long record is not tried too often. False at the end."""
        pieces = [self.text[self.at :]]
        wanted = max(len(pieces[0]), 1)
        while wanted > 0 and not self.ended:
            chunk = next(self.chunks, None)
            self.ended = chunk is None
            pieces.append(self.decoder.decode(chunk or b"", final=self.ended))
            wanted -= len(pieces[-1])
        self.text, self.at = "".join(pieces), 0
        return any(pieces[1:])

    def peek(self) -> str:
        """The next character that is not white space, which `at` then points at; empty at the end."""
        while True:
            self.at = WHITE_SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def move(self, at: int) -> str:
        """Go on at another place, and peek."""
        self.at = at
        return self.peek()

    def scan(self) -> tuple[int, str]:
        """Where the object at `at` ends, and an empty text; or what is wrong with it."""
        while True:
            try:
                return DECODER.raw_decode(self.text, self.at)[1], ""
            except json.JSONDecodeError as error:
                complaint = f"not JSON: {error.msg} at character {error.pos - self.at + 1} of the record"
                unterminated = error.msg.startswith("Unterminated string")
                if not unterminated and error.pos < len(self.text) - LONGEST_TOKEN:
                    return 0, complaint
            except RecursionError:
                return 0, "nested too deeply; expected fewer levels"
            if self.ended:
                return 0, complaint
            if len(self.text) - self.at > MAX_RECORD:
                return 0, f"longer than {MAX_RECORD >> 20} MiB; expected a shorter record"
            self.more()

    def recover(self, openings: Collection[str], guess: bool) -> bool:
        """Go to the next record that begins in one of these ways, or to the end; whether there is one.

        Args:
            guess: take any object where no such record is in sight.
        """
        while True:
            if (place := self._find("|".join(map(re.escape, openings)))) >= 0:
                self.at = place
                return True
            if guess and (place := self._find(ANY_OPENING)) >= 0:
                self.at = place
                return False
            longest = max(map(len, openings), default=0)  # the end of the buffer may cut one
            self.at = max(self.at, len(self.text) - longest)
            if not self.more():
                self.at = len(self.text)
                return False

    def _find(self, opening: str) -> int:
        """Where the next object with such an opening stands, -1 where there is none; a field's value does not count."""
        for hit in re.compile(opening).finditer(self.text, self.at) if opening else ():
            if not FIELD.search(self.text, max(0, hit.start() - FIELD_REACH), hit.start()):
                return hit.start()
        return -1
