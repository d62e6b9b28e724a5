"""Tables as text whose quotes, headers or beginnings are odd: no row is swallowed or trained as what it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard

from data.errors import DataError
from data.records.record import Instruct, Record
from data.records.sources import as_sources
from tests.data.helpers import good, read
from tests.data.records.format_cases import instruct

BOM = b"\xef\xbb\xbf"


def table(folder: Path, name: str, *lines: str) -> Path:
    """A table of the columns question and answer, of lines with a bar between the cells."""
    content = "\n".join(["question|answer", *lines]).replace("|", "," if name.endswith(".csv") else "\t")
    (folder / name).write_text(content + "\n", encoding="utf-8")
    return folder / name


def skipped(path: Path) -> tuple[list[Record], list[str]]:
    """The records that are left, and what is told of the others."""
    told: list[str] = []
    left = [record for _, record in read(as_sources(str(path)), "skip", told.append)]
    return left, [line.removeprefix(f"skipped: {path}: ") for line in told]


def asked(records: list[Record]) -> list[str]:
    return [record.instruct for record in records if isinstance(record, Instruct)]


NEXT = [f"q{number}|a{number}" for number in range(3, 40)]
SWALLOWED = "lines that quotes join into one row, though each looks like one; expected other quotes doubled, or JSONL"


@pytest.mark.parametrize(
    "rows",
    [
        ['"Hello there|Hi.', 'How long is a 20"|20 inches.'],
        ['"A|b', "c|d", "e|f", 'g"|h'],
        ['q|"Hi', 'q2|there"'],
    ],
)
def test_rows_that_a_quote_joins_are_refused(rows: list[str], tmp_path: Path) -> None:
    path = table(tmp_path, "a.tsv", "q1|a1", *rows, *NEXT)
    with pytest.raises(DataError) as refused:
        good(path)
    assert str(refused.value) == f"{path}: record 2: {len(rows)} {SWALLOWED}"
    left, told = skipped(path)
    assert asked(left) == ["q1", *(f"q{number}" for number in range(3, 40))]
    assert told == [f"record 2: {len(rows)} {SWALLOWED}", "1 bad record skipped"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (['"a\tb"|c'], instruct("a\tb", "c")),
        (['q|"one', 'two"'], instruct("q", "one\ntwo")),
        (['q|"def f():', "\treturn 1", '"'], instruct("q", "def f():\n\treturn 1\n")),
        (['q|"She said ""no""."'], instruct("q", 'She said "no".')),
        (['How long is a 20"|20 inches.'], instruct('How long is a 20"', "20 inches.")),
    ],
)
def test_quotes_as_programs_write_them_are_read(rows: list[str], expected: Record, tmp_path: Path) -> None:
    assert good(table(tmp_path, "a.tsv", *rows)) == [expected]


@pytest.mark.parametrize("row", ['"Hello" he said.|Hi.', 'q|"Hi" there', '"open|a'])
def test_a_row_of_a_tsv_whose_quote_is_none_is_lost_alone(row: str, tmp_path: Path) -> None:
    left, told = skipped(table(tmp_path, "a.tsv", "q1|a1", row, *NEXT))
    assert asked(left) == ["q1", *(f"q{number}" for number in range(3, 40))]
    assert told[0].startswith("record 2: cannot be read: ") and told[1:] == ["1 bad record skipped"]


@pytest.mark.parametrize("row", ['"Hello" he said.|Hi.', '"open|a'])
def test_what_a_bad_quote_of_a_csv_costs_is_counted(row: str, tmp_path: Path) -> None:
    """There a comma is a word's as often as a border, so that nobody can tell where the next row begins."""
    left, told = skipped(table(tmp_path, "a.csv", "q1|a1", row, *NEXT))
    assert asked(left) == ["q1"]
    assert told[0].startswith(f"record 2: cannot be read, and {len(NEXT)} lines behind it neither: ")


def test_a_cell_that_goes_on_in_another_line_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    left, told = skipped(table(tmp_path, "a.tsv", "q1|a1", '"He said "hi"', 'there"|x', *NEXT))
    assert asked(left) == ["q1"]
    assert told[0].startswith(f"record 2: cannot be read, and {len(NEXT) + 1} lines behind it neither: ")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize(
    "again", ["question|answer", "answer|question", "\ufeffquestion|answer", '\ufeff"question"|answer']
)
def test_a_header_in_the_middle_is_no_record(again: str, name: str, tmp_path: Path) -> None:
    left, told = skipped(table(tmp_path, name, "q1|a1", again, "q2|a2"))
    assert asked(left) == ["q1", "q2"]
    assert told[0] == "record 2: the names of the columns once more, as where files were joined; expected a record"


def test_a_row_of_some_of_the_names_is_one(tmp_path: Path) -> None:
    assert good(table(tmp_path, "a.csv", "question|question")) == [instruct("question", "question")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv"])
def test_files_that_were_joined_may_begin_with_marks(name: str, tmp_path: Path) -> None:
    parts = {"a.txt": (b"one\n", b"two\n"), "a.csv": (b"text\none\n", b"two\n")}
    first, second = parts.get(name, (b'{"text": "one"}\n', b'{"text": "two"}\n'))
    (tmp_path / name).write_bytes(BOM + first + BOM + second + BOM)
    assert [getattr(record, "text", None) for record in good(tmp_path / name)] == ["one", "two"]


@pytest.mark.parametrize("places", [(0,), (0, 1), (1, 2), (2,)])
def test_frames_of_zstd_that_hold_nothing_are_passed_over(places: tuple[int, ...], tmp_path: Path) -> None:
    """pzstd begins with one, in which it keeps lengths."""
    frames = [zstandard.compress(f'{{"prompt": "q{number}", "completion": "a"}}\n'.encode()) for number in (1, 2)]
    for place in reversed(places):
        frames.insert(place, bytes([0x50 + place]) + b"\x2a\x4d\x18\x04\0\0\0abcd")
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert good(tmp_path / "a.jsonl.zst") == [instruct("q1", "a"), instruct("q2", "a")]


def test_lz4_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\x04\x22\x4d\x18" + bytes(20))
    with pytest.raises(DataError, match="is compressed by lz4; expected it unpacked, or gzip or zstd"):
        good(tmp_path / "a.jsonl")
