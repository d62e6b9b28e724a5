"""The raw records that a file holds: any layout, compression and damage, whatever the file is called."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from data.errors import DataError
from data.records import files, json_values, raw_records
from data.records.raw_records import RawRecord
from data.records.reading import parse

RECORDS: list[dict[str, Any]] = [
    {"text": "one"},
    {"text": "zwei \u2028 \U0001f917 { ] , ["},
    {"text": 'thr"ee\\', "id": 3, "more": {"text": "inner", "list": [1, {"text": "x"}]}},
    {"text": "four\n"},
]


def read(path: Path, format_name: str | None = None) -> list[RawRecord]:
    return list(raw_records.read_file(path, format_name))


def values(path: Path, format_name: str | None = None) -> list[Any]:
    """What the records of a file hold; complaints as text."""
    return [json.loads(raw.value) if raw.kind == "json" else raw.value for raw in read(path, format_name)]


LAYOUTS: dict[str, Callable[[], str]] = {
    "a list in one line": lambda: json.dumps(RECORDS),
    "a list in one line that no line break ends": lambda: json.dumps(RECORDS, ensure_ascii=False),
    "a compact list": lambda: json.dumps(RECORDS, separators=(",", ":")),
    "a list over many lines": lambda: "\n" + json.dumps(RECORDS, indent=2, ensure_ascii=False) + "\n",
    "a list, one object a line": lambda: "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]\n",
    "lines": lambda: "".join(json.dumps(record) + "\n" for record in RECORDS),
    "lines with carriage returns": lambda: "".join(json.dumps(record) + "\r\n" for record in RECORDS),
    "lines without the last break": lambda: "\n".join(map(json.dumps, RECORDS)),
    "objects over many lines": lambda: "\n".join(json.dumps(record, indent=4) for record in RECORDS),
    "objects side by side": lambda: "".join(map(json.dumps, RECORDS)),
    "the field data of an object": lambda: json.dumps({"version": "1.1", "data": RECORDS}),
    "the field data, then another": lambda: json.dumps({"data": RECORDS, "version": [1, 2]}, indent=1),
}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_json_file_holds_is_found_from_its_content(layout: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(LAYOUTS[layout](), encoding="utf-8")
    assert values(path) == RECORDS
    path.write_text(LAYOUTS[layout](), encoding="utf-8-sig")
    assert values(path) == RECORDS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_records_are_whole_wherever_the_chunks_end(
    layout: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (files, json_values):
        monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(raw_records, "HEAD", 48)  # less than the file
    path = tmp_path / "a.json"
    path.write_text(LAYOUTS[layout](), encoding="utf-8")
    assert values(path) == RECORDS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1 << 10, 100 << 10, 3 << 20])  # below a head, below a chunk, several chunks
def test_what_a_file_holds_is_found_at_any_size(layout: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECORDS[1], "text", "\u4e2d{" * (size // 4))
        path.write_text(LAYOUTS[layout](), encoding="utf-8")
        assert values(path) == RECORDS


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "a"}', [{"text": "a"}]),
        (b'{\n"text":\n"a"}\n', [{"text": "a"}]),
        (b'{"data": [1, 2]}\n{"data": [3]}\n', [{"data": [1, 2]}, {"data": [3]}]),  # lines with a field of that name
        (b'{"id": "x", "data": "a"}', [{"id": "x", "data": "a"}]),
        (b'{"version": "1", "train": [{"text": "a"}]}', [{"text": "a"}]),
        (b'{"schema": {"fields": [{"name": "data"}]}, "data": [{"text": "a"}], "n": 1}', [{"text": "a"}]),
        (b'\n{ "n": 1.5e3,\n"ok": true, "samples" : [\n{"text": "a"}]}', [{"text": "a"}]),
        (b'{"rows": [], "records": "none"}', ["expected at least one record, found none"]),
        (b'{"text": "a", "train": true}', [{"text": "a", "train": True}]),
        (b'{"messages": [{"role": "user"}]}', [{"messages": [{"role": "user"}]}]),
        (b'[1, "a"]', ["expected an object, found '1'", "expected an object, found '\"'"]),
        (b'[{"text": "a"},]', [{"text": "a"}]),
        (b'[{"text": "a"} {"text": "b"}]', [{"text": "a"}, {"text": "b"}]),
    ],
)
def test_small_files(content: bytes, expected: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert values(path) == expected


@pytest.mark.parametrize("content", [b"", b"\n \n", b"[]", b" [ ] ", b"\xef\xbb\xbf"])
def test_a_file_without_records_says_so(content: bytes, tmp_path: Path) -> None:
    for name in ("a.json", "a.txt"):
        path = tmp_path / name
        path.write_bytes(content if name == "a.json" else content.translate(None, b"[]"))
        assert read(path) == [RawRecord(0, "damage", "expected at least one record, found none")]


def test_numbers_are_those_of_the_lines_or_of_the_entries(tmp_path: Path) -> None:
    lines, entries = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text('{"text": "a"}\n\n  \n{"text": "b"}\n')
    entries.write_text('[\n\n{"text": "a"},\n{"text": "b"}]')
    assert [raw.number for raw in read(lines)] == [1, 4]
    assert [raw.number for raw in read(entries)] == [1, 2]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bin"])
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compression_is_found_from_the_content(
    pack: Callable[[bytes], bytes], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ZSTD_CHUNK", 11)
    lines = [json.dumps(record).encode() + b"\n" for record in RECORDS]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(map(pack, lines)))  # several members or frames, as `cat` makes them
    assert values(path) == RECORDS


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_the_records_before_a_cut_are_kept_and_the_cut_is_reported(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    texts = [{"text": os.urandom(200).hex()} for _ in range(2000)]
    packed = pack("".join(json.dumps(text) + "\n" for text in texts).encode())
    path = tmp_path / "a.jsonl"
    path.write_bytes(packed[: len(packed) // 2])
    *kept, broken, damage = read(path)
    assert 700 < len(kept) < 1100
    assert [json.loads(raw.value) for raw in kept] == texts[: len(kept)]
    assert broken.kind == "json"
    assert (damage.number, damage.kind) == (0, "damage")
    assert damage.value.startswith("cannot be read to its end, records may be missing: Compressed file ended before")
    path.rename(text := tmp_path / "a.txt")  # where half a line would be a record
    *kept, damage = read(text)
    assert damage.kind == "damage" and 700 < len(kept) < 1100
    assert [json.loads(raw.value) for raw in kept] == texts[: len(kept)]


def test_parquet_rows_come_in_batches_and_without_nulls_in_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_records, "ROWS", 3)
    rows: list[dict[str, Any]] = [{"text": f"row {number}"} for number in range(10)]
    rows[4] |= {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": "a", "name": "f"}]}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"text": None, "messages": None}, *rows]), path, row_group_size=4)
    nothing = {"text": None, "messages": None}
    assert values(path) == [nothing | row for row in [{}, *rows]]
    assert [raw.number for raw in read(path)] == list(range(1, 12))


def test_damage_of_a_parquet_file_is_reported(tmp_path: Path) -> None:
    texts = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path)
    first, second, third = read(path)  # a row that is no UTF-8 costs no other
    assert (first.value, third.value) == ({"text": "a"}, {"text": "c"})
    assert (second.number, second.kind) == (2, "damage")
    path.write_bytes(path.read_bytes()[:-9])
    (damage,) = read(path)
    assert damage.value.startswith("cannot be read to its end, records may be missing: ")


def test_text_is_a_record_a_line_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("{one}\n\n two \n", encoding="utf-8-sig")
    assert values(path) == values(path, "text") == [b"{one}", b" two "]
    assert values(path, "text_file") == [b"{one}\n\n two \n"]
    other = path.rename(tmp_path / "a.md")
    other.write_text("# one\ntwo")
    assert values(other, "text") == [b"# one", b"two"]
    other.write_text(json.dumps(RECORDS))
    assert values(other, "text") == RECORDS  # of a JSON file, its field


BROKEN = b'{"text": "a "quoted" word", "id": {"text": "x"}}'
GOOD = [b'{"text": "%d", "inner": [{"role": "x"}, {"role": "y"}]}' % number for number in range(4)]


@pytest.mark.parametrize(
    "broken",
    [
        BROKEN,
        b'{"text": "no closing quote, "inner": [{"role": "x"}]}',
        b'{"text": "a", "inner": [{"role": "x"}, {"role": "y"}}',
        b'{"text": "a", "inner": [{"role": "x"}, {"role": "y"}]',
        b'"text": "a", "inner": [{"role": "x"}, {"role": "y"}]}',
        b'{"text": "a"}}',
        b'{"text": "a"}]',
        b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b"\x00\xff",
    ],
)
@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("separator", [b", ", b",\n  "])
@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_what_stands_before_a_break_is_kept_and_what_is_lost_is_told(
    broken: bytes, place: int, separator: bytes, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (files, json_values):
        monkeypatch.setattr(module, "CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + separator.join([*GOOD[:place], broken, *GOOD[place:]]) + b"]")
    *kept, last = read(path)
    assert [raw.value for raw in kept][:place] == GOOD[:place]
    assert all(raw.kind == "json" for raw in kept)
    assert last.kind == "damage"
    assert last.number >= place
    if place < len(GOOD):
        assert "what follows in this file cannot be read" in last.value


def test_a_value_that_is_no_object_costs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b", ".join([GOOD[0], b"[{}]", b"null", b'"{"', b"-1.5", GOOD[1]]) + b"]")
    raws = read(path)
    assert [raw.value for raw in raws if raw.kind == "json"] == GOOD[:2]
    complaints = [raw.value for raw in raws if raw.kind == "damage"]
    assert complaints == [f"expected an object, found {first!r}" for first in '[n"-']
    assert [raw.number for raw in raws] == [1, 2, 3, 4, 5, 6]


def test_a_list_that_is_cut_off_keeps_its_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    whole = b"[" + b", ".join(GOOD)
    path.write_bytes(whole)
    assert [raw.value for raw in read(path)] == [*GOOD, "not JSON: the list has no end; the file is cut off"]
    path.write_bytes(whole[:-10])
    *kept, damage = read(path)
    assert [raw.value for raw in kept] == GOOD[:-1]
    assert damage[:2] == (4, "damage")


@pytest.mark.parametrize(
    ("behind", "complaint"),
    [
        ("}", ""),
        (', "version": {"data": [1]}}', ""),
        (
            ', "test": [{"text": "b"}]}',
            "the fields 'data' and 'test' hold records; expected one list of records in a file",
        ),
        ('}, {"text": "b"}]}', "not JSON: something follows the end of the list"),
        (
            ', {"text": "b"}]}',
            "not JSON: Expecting property name enclosed in double quotes at character 3 of the record",
        ),
    ],
)
def test_what_stands_beside_the_list_of_a_field(behind: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"name": "n", "data": [{"text": "a"}]' + behind, encoding="utf-8")
    first, *others = read(path)
    assert json.loads(first.value) == {"text": "a"}
    assert [raw.value for raw in others] == [f"{complaint}; {json_values.REST_IS_LOST}"] * bool(complaint)


def test_what_is_too_long_for_a_record_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (raw_records, json_values):
        monkeypatch.setattr(module, "MAX_RECORD", 1 << 20)
    monkeypatch.setattr(files, "CHUNK", 1000)
    lines = [b'{"text": "a"}', b'{"text": "' + b"x" * (4 << 20) + b'"}', b'{"text": "b"}']
    for name, content in {"a.jsonl": b"\n".join(lines), "a.json": b"[" + b",".join(lines) + b"]"}.items():
        path = tmp_path / name
        path.write_bytes(content)
        first, second, *others = read(path)
        assert [first.value, *(raw.value for raw in others)] == (
            [lines[0], lines[2]] if name == "a.jsonl" else lines[:1]
        )
        assert second[:2] == (2, "damage")
        lost = f"; {json_values.REST_IS_LOST}" if name == "a.json" else ""
        assert second.value == f"longer than 1 MB; expected a shorter record{lost}"
    path = tmp_path / "a.txt"
    path.write_bytes(b"x " * (1 << 20))
    assert values(path, "text_file") == ["longer than 1 MB; expected a shorter record"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('// one\n{"text": "t"}', "column 1, a comment or a comma too many; expected none in a line"),
        ('{"text": "t"}\n{"text": "u" /* two */}', "column 14, a comment or a comma too many; expected none in a line"),
        ('{"text": "t"}\n{"text": "u",}', "column 14, a comment or a comma too many; expected none in a line"),
        ('[\n  {"text": "t"},\n  # two\n  {"text": "u"}]', "a comment; expected none"),
        ('[{"text": "t", "tags": [/* two', "a comment; expected none"),
        ('[{"text": "t",, "tags": 1}]', "Expecting property name enclosed in double quotes"),
        ('[{"text": "t", "tags": [,]}]', "Expecting value at character 24"),
        ('[{"text": "t"}, /]', "Expecting value at character 1"),
    ],
)
def test_what_cannot_be_passed_over_is_named(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    told = []
    for raw in raw_records.read_file(tmp_path / "a.json"):
        try:
            parse(raw)
        except DataError as error:
            told.append(str(error))
    assert any(expected in line for line in told)


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize(
    "text",
    [
        '// a list: [\n[ // one\n{"text": "http://a /* b */ ,]", // "two"\n "tags": [1, 2,], }, '
        '/* t\nw\no */ {"text": "u",},] // end',
        '{"text": "http://a /* b */ ,]",\n "tags": [1, /* 1 */ 2 /**/,\n], // two\n}\n// three\n{"text": "u"}\n',
        '{"data": [ {"text": "http://a /* b */ ,]", "tags": [1, 2] /* x */}, {"text": "u"}, // y\n], /* z */ "n": 3,}',
    ],
)
def test_comments_and_commas_before_a_closing_bracket_are_passed_over(
    text: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_values, "CHUNK", chunk)
    (tmp_path / "a.json").write_text(text)
    raws = list(raw_records.read_file(tmp_path / "a.json"))
    assert [json.loads(raw.value) for raw in raws] == [
        {"text": "http://a /* b */ ,]", "tags": [1, 2]},
        {"text": "u"},
    ]
    assert raws[0].kind == "mended"
