"""Damaged records and files by the thousand: never a traceback, never a hang, and what is not damaged is read.

A file is put together from known records, and something happens to it: bytes are changed, put in or taken out in one
place, or its end is missing. Only the records that this place touches may be lost. `make test-slow` tries 10,000.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from pyarrow import parquet

from data.errors import DataError
from data.records.files import GZIP, MARKS, ZSTD
from data.records.json_values import REST_IS_LOST
from data.records.raw_records import ARROW, ARROW_STREAM, PARQUET, RawRecord
from data.records.reading import LONGEST_LINE, SHOWN, parse
from data.records.record import Pretrain, Record
from data.settings import FORMAT_NAMES, TEXT_FILE, Source
from tests.data.helpers import RECORDS, read
from tests.data.records.format_cases import CASES

BASES: list[Any] = [*RECORDS.values(), *(raw for cases in CASES.values() for raw, _ in cases)]


ODD_VALUES: list[Any] = [None, True, 0, -1, 1e308, 10**40, "", "\0", "\ud800", "\U0010ffff\u2028", [], {}, [None]]
ODD_VALUES += [{"": None}, [[]], *map(float, ("nan", "inf", "-inf")), "x" * 100_000, [0] * 10_000, {"type": "pretrain"}]
ODD_VALUES += ["@150", "@250", "@900"]  # becomes as many lists in each other
ODD_VALUES += [*FORMAT_NAMES, *"human gpt assistant tool ask ans ans-api [ {".split(), '{"name": "f"}']
JUNK: SearchStrategy[Any] = st.sampled_from(ODD_VALUES) | st.text(max_size=8)
MARKUP = [*rb'" \ { } [ ] , : NaN - 1e999 /* \ud800 {"text": \"'.split(), b"\n", b"\r", b"\0", b'{"a": [', b'"}]}, ']
MARKUP += [b"\xc3", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf"]
SPLINTERS: SearchStrategy[bytes] = st.binary(min_size=1, max_size=6) | st.sampled_from(MARKUP)


@st.composite
def spoiled(draw: DrawFn, base: Any) -> Any:
    """A record in which one value, or one name, is another."""
    base = json.loads(json.dumps(base))
    node: Any = base
    owner: Any = None
    key: Any = None
    while isinstance(node, (dict, list)) and node and (owner is None or draw(st.integers(0, 3))):
        owner, key = node, draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node = node[key]
    if owner is None:
        return draw(JUNK)
    action = draw(st.sampled_from(["replace", "remove", "rename"]))
    if action == "replace":
        owner[key] = draw(JUNK)
    else:
        value = owner.pop(key)
        if action == "rename" and isinstance(owner, dict):
            owner[draw(st.text(max_size=5))] = value
    return base


class Damage(NamedTuple):
    """From `start` (a share of all) on, `length` bytes become others; with `cut`, all that follows is lost."""

    start: float
    length: int
    splinter: bytes
    times: int
    cut: bool

    def place(self, content: bytes) -> tuple[int, int]:
        """First byte that is touched, and first that is not."""
        start = int(self.start * len(content))
        return start, len(content) if self.cut else min(len(content), start + self.length)

    def on(self, content: bytes) -> bytes:
        start, stop = self.place(content)
        return content[:start] + self.splinter * self.times + content[stop:]


PLACES, ONCE, MANY, WHOLE = st.floats(0, 1), st.just(1), st.just(5000), st.just(False)
DAMAGES: SearchStrategy[Damage] = st.one_of(
    st.builds(Damage, PLACES, st.integers(0, 3), SPLINTERS, ONCE, WHOLE),
    st.builds(Damage, PLACES, st.integers(1, 40), st.just(b""), ONCE, WHOLE),
    st.builds(Damage, PLACES, st.just(0), st.sampled_from([b"[", b'{"a":', b"x", b"1", b" ", b"\0"]), MANY, WHOLE),
    st.builds(Damage, PLACES, st.just(0), st.just(b""), ONCE, st.just(True)),
)
NAMES: SearchStrategy[str | None] = st.one_of(st.none(), st.none(), st.sampled_from([*FORMAT_NAMES, TEXT_FILE]))


def check_usable(record: Record) -> None:
    """A record that is accepted can be written, so it can be tokenized."""
    record.model_dump_json().encode("utf-8")


def check_record(raw: RawRecord, format_name: str | None) -> None:
    try:
        records, unused, *_ = parse(raw, format_name)
    except DataError as error:
        assert str(error)
        return
    assert records
    assert isinstance(raw.value, (bytes, dict))
    assert not unused or raw.kind in ("json", "row")
    for record in records:
        check_usable(record)


def record_body(base: Any, damage: Damage | None, kind: Any, format_name: str | None) -> None:
    """One record on its way from bytes, or from a table's row."""
    content = re.sub(
        rb'"@(\d+)"', lambda levels: b"[" * int(levels[1]) + b"]" * int(levels[1]), json.dumps(base).encode()
    )
    if kind == "row":
        if b"\\ud800" not in content:  # no table holds half a character
            check_record(RawRecord(1, kind, base), format_name)
    else:
        check_record(RawRecord(1, kind, damage.on(content) if damage else content), format_name)


RECORD_ARGUMENTS: dict[str, SearchStrategy[Any]] = {
    "base": st.sampled_from(BASES).flatmap(spoiled),
    "damage": st.one_of(st.none(), DAMAGES),
    "kind": st.sampled_from(["json", "json", "row", "text"]),
    "format_name": NAMES,
}
FOREIGN = [mark for marks in MARKS for mark in (marks if isinstance(marks, tuple) else (marks,))]
# With such bytes at its beginning it is another file.
OTHER_FILES = (GZIP, ZSTD, PARQUET, ARROW, ARROW_STREAM, *FOREIGN)


class Frame(NamedTuple):
    """What stands before, between and behind the records of a file; whether damage before them may cost all."""

    before: bytes
    between: bytes
    behind: bytes
    suffix: str
    dump: Callable[[Any], str] = json.dumps
    fragile: bool = False


FRAMES = {
    "lines": Frame(b"", b"\n", b"\n", ".jsonl"),
    "lines named json": Frame(b"", b"\n", b"\n", ".json"),
    "flat list": Frame(b"[", b", ", b"]", ".json"),
    "compact list": Frame(b"[", b",", b"]", ".json"),
    "list of lines": Frame(b"[\n", b",\n", b"\n]\n", ".json"),
    "indented list": Frame(b"[\n  ", b",\n  ", b"\n]", ".json", lambda raw: json.dumps(raw, indent=2)),
    "field data": Frame(b'{"version": "1", "data": [', b", ", b"]}", ".json", fragile=True),
    "text": Frame(b"", b"\n", b"\n", ".txt", lambda raw: raw["text"]),
}
A_LIST = re.compile(r"expected an object, found ('\['|a list)")  # between records, or in the place of one
FILLINGS: list[dict[str, Any]] = [
    {},
    {"id": 1, "inner": {"list": [{"role": "a", "content": "b, {"}, {"role": "c", "content": '\\"}]'}], "x": -1.5e3}},
    {"inner": [{"text": "no record"}, {"text": "neither"}]},
]
ALIKE = 2  # the filling that looks like records


def texts_read(path: Path) -> tuple[list[str], list[str]]:
    """The texts that come out of a file, bad records skipped, and the log, which is looked at as well."""
    log: list[str] = []
    texts = []
    for _, record in read([Source(path=str(path))], "skip", log.append):
        check_usable(record)
        texts += [record.text] if isinstance(record, Pretrain) else []
    assert len(log) <= SHOWN + 1
    assert all(line.isprintable() and len(line) < LONGEST_LINE + 20 for line in log)
    lines: list[str] = []
    try:
        list(read([Source(path=str(path))], "stop", lines.append))
        assert not log
    except DataError as error:
        assert log
        assert all(map(str.isprintable, str(error).split("\n")))
    return texts, log


def file_body(folder: Path, name: str, count: int, filling: int, damage: Damage) -> None:
    """A file is damaged in one place: all records before it are read, and those behind it, or their loss is told."""
    frame = FRAMES[name]
    if frame.fragile and filling == ALIKE:
        return  # what is left can be a whole record again, whose inner list holds the others
    texts = [f"text number {number} \u4e2d" for number in range(count)]
    pieces = [frame.dump({"text": text, **FILLINGS[filling]}).encode() for text in texts]
    content = frame.before + frame.between.join(pieces) + frame.behind
    path = folder / f"a{frame.suffix}"
    path.write_bytes(damage.on(content))
    start, stop = damage.place(content)
    untouched, safe, begin = [], 0, len(frame.before)
    for text, piece in zip(texts, pieces, strict=True):
        # What stands between two records belongs to both of them.
        first, last = begin - len(frame.between), begin + len(piece) + len(frame.between)
        if stop < first or start > last:
            untouched.append(text)
            safe += start > last
        begin += len(piece) + len(frame.between)
    if (frame.fragile and start <= len(frame.before)) or damage.on(content).startswith(OTHER_FILES):
        untouched, safe = [], 0
    found, log = texts_read(path)
    kept = [text for text in found if text in untouched]
    assert kept == untouched[: len(kept)]
    if len(kept) < len(untouched):
        assert frame.before or start <= len(pieces[0])  # the first line shows that a file has one record a line
        assert len(kept) >= safe
        assert any(REST_IS_LOST in line or A_LIST.search(line) for line in log)


FILE_ARGUMENTS: dict[str, SearchStrategy[Any]] = {
    "name": st.sampled_from(sorted(FRAMES)),
    "count": st.integers(1, 6),
    "filling": st.integers(0, len(FILLINGS) - 1),
    "damage": DAMAGES,
}


def plain_prefix(packed: bytes) -> bytes:
    """What zlib makes of a gzip file whose end is missing."""
    unpacker = zlib.decompressobj(wbits=31)
    return unpacker.decompress(packed)


def packed_body(folder: Path, kind: str, count: int, damage: Damage) -> None:
    """A compressed or a binary file is damaged: it is reported, and what stands before a cut is read."""
    texts = [f"{zlib.crc32(b'%d' % number):x} number {number}" for number in range(count)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path = folder / "a.jsonl"
    if kind == "gzip":
        path.write_bytes(gzip.compress(lines, mtime=0))
    elif kind == "zstd":
        path.write_bytes(zstandard.compress(lines))
    else:
        parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=7)
    content = path.read_bytes()
    path.write_bytes(damage.on(content))
    found, _ = texts_read(path)
    if damage.on(content) == content:
        assert found == texts
    elif damage.cut and kind == "gzip":
        whole = plain_prefix(damage.on(content)).count(b"\n")
        assert found[:whole] == texts[:whole]


PACKED_ARGUMENTS: dict[str, SearchStrategy[Any]] = {
    "kind": st.sampled_from(["gzip", "zstd", "parquet"]),
    "count": st.integers(0, 60),
    "damage": DAMAGES,
}


def tries(count: int) -> settings:
    """Few examples are the same each time; how long one takes does not matter."""
    checks = list(HealthCheck)
    return settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=checks, derandomize=count < 1000
    )


@pytest.mark.parametrize(
    "count", [150, pytest.param(900, marks=pytest.mark.slow), pytest.param(5000, marks=pytest.mark.longest)]
)
def test_a_spoiled_record_is_read_or_refused(count: int) -> None:
    tries(count)(given(**RECORD_ARGUMENTS)(record_body))()


@pytest.mark.parametrize(
    "count", [150, pytest.param(900, marks=pytest.mark.slow), pytest.param(4000, marks=pytest.mark.longest)]
)
def test_damage_costs_no_record_that_it_does_not_touch(count: int, tmp_path: Path) -> None:
    @tries(count)
    @given(**FILE_ARGUMENTS)
    def check(**arguments: Any) -> None:
        file_body(tmp_path, **arguments)

    check()


@pytest.mark.parametrize(
    "count", [50, pytest.param(300, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.longest)]
)
def test_a_damaged_binary_file_is_reported(count: int, tmp_path: Path) -> None:
    @tries(count)
    @given(**PACKED_ARGUMENTS)
    def check(**arguments: Any) -> None:
        packed_body(tmp_path, **arguments)

    check()
