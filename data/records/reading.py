"""Parse raw records and handle bad ones as `on_bad_record` says.

A bad record is logged in one line: file, number, field and what was expected. At most 20 lines are shown. `stop`
looks for as many before it gives up, so that a person mends them all in one go; `skip` goes on without the bad ones and
counts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from pydantic_core import from_json

from common.terminal import safe_line
from data.errors import DataError
from data.records.formats import Converted, convert
from data.records.json_values import split_records
from data.records.raw_records import RawRecord
from data.settings import TEXT_FILE, OnBadRecord, Wanted

SHOWN = 20
LONGEST_LINE = 1000
NAN = re.compile(rb'"(\w+)"\s*:\s*(?:\[\s*)?(-?(?:NaN|Infinity))\b')


def origin(file: str, number: int) -> str:
    """Name a record's file and its number there, from 1 (0: the whole file)."""
    return f"{file}: record {number}" if number else file


def parse(
    raw: RawRecord,
    format_name: str | None = None,
    columns: Mapping[str, str] | None = None,
    preference: Wanted | None = None,
) -> Converted:
    """Parse one raw record: mostly one record, several if its layout holds several samples.

    Args:
        format_name, columns: as in `Source`.
        preference: which kind is expected; none where absent.

    Raises:
        DataError: it is broken or no known record; the text says what was expected, without file and number.
    """
    if raw.kind == "damage":
        raise DataError(raw.value)
    if raw.kind == "text":
        return convert({"text": _text(raw.value)}, "text", preference=preference)
    value = raw.value if raw.kind == "row" else _json(raw.value)
    return convert(value, None if format_name == TEXT_FILE else format_name, columns, preference)


def _text(line: bytes) -> str:
    if (place := line.find(b"\0")) >= 0:
        raise DataError(f"byte {place + 1} is NUL; expected plain text")
    return _decoded(line).rstrip("\r\n")


def _json(text: bytes) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        _decoded(text)
        if found := NAN.search(text):
            complaint = f"field {found[1].decode()}: {found[2].decode()} is no JSON; expected a number or null"
            raise DataError(complaint) from None
        comment = text.lstrip().startswith(b"#") or all(
            kind != "damage" for _, kind, _ in split_records(BytesIO(text), False)
        )
        reason = f"{error}, a comment or a comma too many; expected none in a line" if comment else error
        raise DataError(f"not JSON: {reason}") from None


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start + 1} is not UTF-8; expected text in UTF-8") from None


class BadRecords:
    """Collect bad records, then report them or stop."""

    def __init__(self, on_bad_record: OnBadRecord, log: Callable[[str], None]) -> None:
        self.on_bad_record = on_bad_record
        self.log = log
        self.count = 0  # how many there were
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Take note of one.

        Args:
            line: where it is from, and what is wrong.

        Raises:
            DataError: with `stop`, once there are as many as are shown.
        """
        self.count += 1
        if self.count > SHOWN:
            return
        line = safe_line(line, LONGEST_LINE)
        if self.on_bad_record == "skip":
            self.log(f"skipped: {line}")
            return
        self._lines.append(line)
        if self.count == SHOWN:
            self._lines.append(f"{SHOWN} bad records; there may be more, as no further ones were looked for")
            raise DataError(*self._lines)

    def finish(self) -> None:
        """Sum up, after the last record.

        Raises:
            DataError: with `stop`, when there was any.
        """
        if self._lines:
            raise DataError(*self._lines, *([] if self.count == 1 else [f"{self.count} bad records"]))
        if self.count:
            unseen = f", {self.count - SHOWN} of them not shown" if self.count > SHOWN else ""
            records = "record" if self.count == 1 else "records"
            self.log(f"{self.count} bad {records} skipped{unseen}")
