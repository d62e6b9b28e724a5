"""Parse raw records and handle bad ones as `on_bad_record` says.

A bad record is told in one line: file, number, field and what was expected; those of one file with the same fault share
a line. At most 20 records are shown. `stop` looks for as many before it gives up, so that a person mends them all in
one go; `skip` goes on without the bad ones and counts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

from pydantic_core import from_json

from common.terminal import safe_line
from data.errors import DataError
from data.images.in_records import Look
from data.records.formats import Converted, convert
from data.records.json_values import split_records
from data.records.raw_records import RawRecord
from data.settings import TEXT_FILE, OnBadRecord, Wanted

SHOWN = 20
LONGEST_LINE = 1000
PLACE = re.compile(r"(.*?): record (\d+): (.*)", re.DOTALL)
# What Chinese text in GB18030 is made of: ideographs, CJK punctuation, full-width forms.
CHINESE = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef\u2010-\u2027\u00b7]+")
NAN = re.compile(rb'"(\w+)"\s*:\s*(?:\[\s*)?(-?(?:NaN|Infinity))\b')


def parse(
    raw: RawRecord,
    format_name: str | None = None,
    columns: Mapping[str, str] | None = None,
    preference: Wanted | None = None,
    look: Look | None = None,
) -> Converted:
    """Parse one raw record: mostly one record, several if its layout holds several samples.

    Args:
        format_name, columns: as in `Source`.
        preference: which kind is expected; none where absent.
        look: opens an image of the record; none may be there where absent.

    Raises:
        DataError: it is broken or no known record; the text says what was expected, without file and number.
    """
    if raw.kind == "damage":
        raise DataError(raw.value)
    if raw.kind == "text":
        return convert({"text": _text(raw.value)}, "text", preference=preference)
    value = raw.value if raw.kind == "row" else _json(raw.value)
    return convert(value, None if format_name == TEXT_FILE else format_name, columns, preference, look)


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
        if _is_gb18030(text):
            how = "iconv -f GB18030 -t UTF-8 FILE > NEW writes it so"
            raise DataError(f"in GBK or GB18030; expected text in UTF-8: {how}") from None
        raise DataError(f"byte {error.start + 1} is not UTF-8; expected text in UTF-8") from None


def _is_gb18030(text: bytes) -> bool:
    """Say whether bytes are Chinese text in GB18030, of which GBK is a part."""
    try:
        characters = text.decode("gb18030")
    except UnicodeDecodeError:
        return False
    return CHINESE.fullmatch("".join(each for each in characters if not each.isascii())) is not None


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
        self._lines.append(safe_line(line, LONGEST_LINE))
        if self.on_bad_record == "stop" and self.count == SHOWN:
            more = f"{SHOWN} bad records; there may be more, as no further ones were looked for"
            raise DataError(*joined(self._lines), more)

    def finish(self) -> None:
        """Sum up, after the last record.

        Raises:
            DataError: with `stop`, when there was any.
        """
        if not self.count:
            return
        lines = joined(self._lines)
        if self.on_bad_record == "stop":
            raise DataError(*lines, *([] if self.count == 1 else [f"{self.count} bad records"]))
        for line in lines:
            self.log(f"skipped: {line}")
        unseen = f", {self.count - SHOWN} of them not shown" if self.count > SHOWN else ""
        records = "record" if self.count == 1 else "records"
        self.log(f"{self.count} bad {records} skipped{unseen}")


def joined(lines: Sequence[str]) -> list[str]:
    """Join the lines of records of one file with the same fault: `records 1 to 8: ...`."""
    faults: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        found = PLACE.fullmatch(line)
        file, number, fault = found.groups() if found else ("", "0", line)
        faults.setdefault((file, fault), []).append(int(number))
    return [f"{file}: {_numbers(numbers)}: {fault}" if file else fault for (file, fault), numbers in faults.items()]


def _numbers(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"record {first}"
    if numbers == list(range(first, last + 1)):
        return f"records {first} to {last}"
    return f"records {', '.join(map(str, numbers))}"
