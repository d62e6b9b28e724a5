"""Split a file into raw records: cheap pieces that any process can parse.

What a file holds is found from its content: Parquet and Arrow have a mark, and the first line of a JSON file tells a
list, one object a line and objects over several lines apart. Only plain text, `.txt`, and tables as text, `.csv` and
`.tsv`, go by their names, as anything can be text. An object whose field `data` is a list (SQuAD's files, many exports)
is read as that list.

Nothing is parsed here but tables, whose rows come in batches: JSON stays bytes, so that one process can read for many
that parse. A damaged file gives what can be read of it, and a raw record that says what is wrong; one of another kind
is named for what it is.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from common.quantities import counted
from common.terminal import reason_of
from data.records.files import SURROGATE, Unpacked, foreign
from data.records.json_values import DECODER, LONGEST_TOKEN, MAX_RECORD, Kind, split_records
from data.records.sources import TEXT_SUFFIXES, bare_suffix
from data.settings import TEXT_FILE

HEAD = 64 << 10  # bytes that are looked at to find out what a file holds
ROWS = 256  # of a table, made at once
ROWS_BYTES = 64 << 20  # fewer rows where they take more than this, as with images
BUFFER = 1 << 20  # bytes of a Parquet file, read at once

PARQUET, ARROW, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
UTF8_MARK = b"\xef\xbb\xbf"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JOINED = "lines that quotes join into one row, though each looks like one; expected other quotes doubled, or JSONL"
LINE_SUFFIXES = (".jsonl", ".ndjson")
BEFORE = re.compile(rb"\A(?:\s|//[^\n]*\n|/\*.*?\*/)+", re.DOTALL)  # the first record of JSON
# A file's records as the field of an object: {"version": "1.1", "data": [
WRAPPER = re.compile(r'\s*"(\w+)"\s*:\s*')
WRAPPED_IN = ("data", "train", "training", "records", "rows", "samples")


class RawRecord(NamedTuple):
    """Hold one record of a file, not yet parsed."""

    number: int  # from 1; in a file of lines, the number of the line. 0 for the file as a whole.
    # What `value` is: bytes of "json" ("mended", too) or of "text", a "row" of a table, or a complaint about "damage".
    kind: Kind | Literal["text", "row"]
    value: Any


def read_file(file: Path, format_name: str | None = None) -> Iterator[RawRecord]:
    """Yield the records of one file; an empty file yields one that says so."""
    records = _read(file, format_name)
    yield next(records, _damage(0, "expected at least one record, found none"))
    yield from records


def _damage(number: int, complaint: str) -> RawRecord:
    return RawRecord(number, "damage", complaint)


def _read(file: Path, format_name: str | None) -> Iterator[RawRecord]:
    stream = io.BufferedReader(Unpacked(file), HEAD + 1)
    head = stream.peek()
    suffix = bare_suffix(file)
    if head.startswith((PARQUET, ARROW, ARROW_STREAM)):
        yield from _rows(file, head)
    elif complaint := foreign(head, suffix in TEXT_SUFFIXES):
        yield _damage(0, complaint)
    elif suffix in DELIMITERS:
        yield from _cells(stream, DELIMITERS[suffix])
    else:
        stream.read(len(UTF8_MARK) * head.startswith(UTF8_MARK))
        yield from _read_text(suffix, format_name, stream, ended=len(head) <= HEAD)
    for complaint in stream.raw.damage:
        yield _damage(0, complaint)


def _read_text(
    suffix: str, format_name: str | None, stream: io.BufferedReader[Unpacked], ended: bool
) -> Iterator[RawRecord]:
    head = stream.peek()
    named_text = suffix in TEXT_SUFFIXES
    if format_name == TEXT_FILE:
        if (text := stream.read(MAX_RECORD + 1)).strip():
            yield _line(1, "text", text)
    elif format_name in (None, "text") and (named_text or (format_name and not head.lstrip().startswith((b"{", b"[")))):
        for number, line, complete in _lines(stream):
            if complete or not stream.raw.damage:  # half a text looks like a whole one
                yield _line(number, "text", line)
    else:
        layout, skipped, wrapped = _layout_of(head, ended, suffix)
        if layout == "lines":
            for number, line, _ in _lines(stream):
                yield _line(number, "json", line)
        else:
            stream.read(skipped)
            yield from itertools.starmap(RawRecord, split_records(stream, layout == "list", wrapped))


def _layout_of(head: bytes, ended: bool, suffix: str) -> tuple[Literal["lines", "list", "objects"], int, str]:
    """Detect a JSON file's form from its beginning, the bytes before its first record, and the field that holds it."""
    content = BEFORE.sub(b"", head)
    first, line_break, rest = content.partition(b"\n")
    state = _completeness(first.decode("utf-8", "replace").rstrip(), cut=not (line_break or ended))
    more_lines = bool(rest.strip()) or not ended
    named_lines = suffix in LINE_SUFFIXES
    if state == "whole" and more_lines:
        return "lines", 0, ""
    if content.startswith(b"[") and not (state == "broken" and named_lines):
        return "list", len(head) - len(content) + 1, ""
    if (wrapped := _wrapped(head)) and not (state == "cut" and named_lines):
        return "list", *wrapped
    if state in ("open", "several"):
        return "objects", 0, ""
    if state == "broken" and not named_lines:
        second, line_break, _ = rest.lstrip().partition(b"\n")
        if _completeness(second.decode("utf-8", "replace").rstrip(), cut=not (line_break or ended)) != "whole":
            return "list", 0, ""  # as likely as anything; its records are found wherever they are
    return "lines", 0, ""


def _wrapped(head: bytes) -> tuple[int, str] | None:
    """Find the list of records in a file that is one object: where the first one begins, and the list's field."""
    text = head.decode("latin-1")  # a character for each byte
    at = text.find("{") + 1
    while at and (name := WRAPPER.match(text, at)):
        if text[name.end() : name.end() + 1] == "[" and name[1] in WRAPPED_IN:
            return name.end() + 1, name[1]
        try:
            at = DECODER.raw_decode(text, name.end())[1]
        except (ValueError, RecursionError):
            return None
        at = text.find(",", at) + 1 if text[at:].lstrip().startswith(",") else 0
    return None


def _completeness(line: str, cut: bool) -> Literal["whole", "several", "open", "cut", "broken"]:
    """Classify a file's first line: one JSON value, several, the start of one, cut by the read, or wrong."""
    try:
        end = DECODER.raw_decode(line, 0)[1]
        if end == len(line) and line.startswith(("{", "[")):
            return "whole"
        return "several" if line[end:].lstrip().startswith("{") else "broken"
    except json.JSONDecodeError as error:
        unterminated = error.msg.startswith("Unterminated string")
        if cut and (unterminated or error.pos >= len(line) - LONGEST_TOKEN):
            return "cut"
        return "open" if error.pos >= len(line) else "broken"  # no string goes on in the next line
    except RecursionError:
        return "broken"


def _line(number: int, kind: Literal["json", "text"], line: bytes) -> RawRecord:
    if len(line) > MAX_RECORD:
        return _damage(number, f"longer than {MAX_RECORD / 1e6:.0f} MB; expected a shorter record")
    return RawRecord(number, kind, line)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yield non-blank lines: number, bytes (more than allowed if too long), and whether a line break ends it."""
    number = 0
    while part := (line := stream.readline(MAX_RECORD + 1)):
        line, number = line.removeprefix(UTF8_MARK), number + 1  # as files may be joined
        while part and not part.endswith(b"\n"):
            part = stream.readline(MAX_RECORD)
        if line and not line.isspace():
            yield number, line.removesuffix(b"\n"), bool(part)


class _Lines:
    """Give a reader of tables its lines, and once more those that it took with a row that is none."""

    def __init__(self, text: Iterator[str]) -> None:
        self._text = text
        self._again: list[str] = []  # the next one last
        self.taken: list[str] = []  # for the row at hand

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.pop() if self._again else next(self._text).removeprefix("\ufeff")  # as files may be joined
        self.taken.append(line)
        return line

    def give_back(self) -> None:
        """Go on with the second of the lines taken."""
        self._again += self.taken[:0:-1]

    def are_rows(self, columns: int, delimiter: str) -> bool:
        """Say whether each line taken is a row by itself, which only tabs can tell: a comma may be a word's."""
        apart = (line.count("\t") == columns - 1 and not line.startswith("\t") for line in self.taken)
        return delimiter == "\t" and columns > 1 and all(apart)

    def lost(self) -> int:
        """Count the lines behind the first one taken."""
        return len(self.taken) - 1 + len(self._again) + sum(1 for _ in self._text)


def _parsed(lines: _Lines, delimiter: str) -> Iterator[list[str] | csv.Error]:
    """Yield the rows of a text table, its header first, and what is wrong with one; the reader goes on behind it."""
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.taken.clear()
        try:
            if row := next(rows):
                yield row
        except StopIteration:
            return
        except csv.Error as error:
            yield error


def _cells(stream: BinaryIO, delimiter: str) -> Iterator[RawRecord]:
    """Yield the rows of a text table; an empty cell is null, as such a table has no other."""
    csv.field_size_limit(MAX_RECORD)
    # A byte that is no UTF-8 costs its row alone, so it goes through the reader as half a character.
    lines = _Lines(io.TextIOWrapper(stream, "utf-8", errors="surrogateescape", newline="\n"))
    header: list[str] = []
    for number, row in enumerate(_parsed(lines, delimiter)):
        # A quote may join lines; where each of them is a row by itself, they are not one record.
        odd = isinstance(row, csv.Error) or len(lines.taken) > 1
        apart = odd and lines.are_rows(len(header), delimiter)
        if apart and isinstance(row, csv.Error):
            lines.give_back()
            yield _damage(number, f"cannot be read: {row}")
        elif apart:
            yield _damage(number, f"{len(lines.taken):,} {JOINED}")
        elif isinstance(row, csv.Error):
            behind = f", and {counted(lost, 'line')} behind it neither" if (lost := lines.lost()) else ""
            yield _damage(number, f"cannot be read{behind}: {row}")
            return
        elif not number:
            header = row
            if repeated := [name for name in header if header.count(name) > 1]:
                yield _damage(0, f"two columns are called {repeated[0]!r}; expected a first line of different names")
                return
        elif any(map(SURROGATE.search, row)):
            yield _damage(number, "not UTF-8; expected text in UTF-8")
        elif sorted(row) == sorted(header):
            yield _damage(number, "the names of the columns once more, as where files were joined; expected a record")
        elif len(row) == len(header):
            yield RawRecord(number, "row", {name: cell or None for name, cell in zip(header, row, strict=True)})
        else:
            yield _damage(number, f"expected {len(header)} cells, as in the first line, found {len(row)}")


def _batches(file: Path, head: bytes) -> Iterator[Any]:
    """Yield the record batches of a Parquet or an Arrow file."""
    from pyarrow import OSFile, ipc, parquet

    if head.startswith(PARQUET):
        with parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as table:
            groups = map(table.metadata.row_group, range(table.num_row_groups))
            size = sum(group.total_byte_size for group in groups)
            yield from table.iter_batches(batch_size=_at_once(table.metadata.num_rows, size))
    elif head.startswith(ARROW):
        with OSFile(str(file)) as opened, ipc.open_file(opened) as table:
            yield from map(table.get_batch, range(table.num_record_batches))
    else:
        with OSFile(str(file)) as opened, ipc.open_stream(opened) as table:
            yield from table


def _at_once(rows: int, size: int) -> int:
    """Return how many rows to make at once, of a table of so many bytes."""
    return max(1, min(ROWS, ROWS_BYTES * rows // max(size, 1)))


def _slices(batch: Any) -> Iterator[Any]:
    step = _at_once(batch.num_rows, batch.nbytes)
    return (batch.slice(begin, step) for begin in range(0, batch.num_rows, step))


def _rows(file: Path, head: bytes) -> Iterator[RawRecord]:
    """Yield a table's rows without nulls, since a table has all fields in all rows."""
    import pyarrow

    number = 0
    try:
        for batch in _batches(file, head):
            for row in itertools.chain.from_iterable(map(_rows_of, _slices(batch))):
                number += 1
                if isinstance(row, str):
                    yield _damage(number, row)
                else:
                    yield RawRecord(number, "row", {name: _without_nulls(field) for name, field in row.items()})
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        yield _damage(0, f"cannot be read to its end, records may be missing: {reason_of(error)}")


def _rows_of(batch: Any) -> Iterator[dict[str, Any] | str]:
    """Yield a batch's rows, or a complaint for a row that cannot be read (such as bytes that are not UTF-8)."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for row in range(batch.num_rows):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except (ValueError, OverflowError) as error:
                yield f"cannot be read: {' '.join(str(error).split())}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value
