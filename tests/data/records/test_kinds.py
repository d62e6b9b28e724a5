"""Files of every kind: tables as text, Arrow, and those that hold no records, which are named for what they are."""

from __future__ import annotations

import bz2
import io
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc

from data.errors import DataError
from data.records.record import Pretrain
from data.records.sources import as_sources
from tests.data.helpers import good, read
from tests.data.records.format_cases import instruct


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(read(as_sources(str(path)), "stop", pytest.fail))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("a.CSV", ",")])
def test_tables_as_text_are_read_with_their_line_breaks_and_quotes(name: str, delimiter: str, tmp_path: Path) -> None:
    rows = ["id,instruction,input,output", '1,"Say ""hi"",\nplease",,007', "2,二,x,3.0"]
    path = tmp_path / name
    path.write_text("\ufeff" + "\r\n".join(rows).replace(",", delimiter) + "\r\n", encoding="utf-8", newline="")
    assert good(path) == [instruct(f'Say "hi"{delimiter}\nplease', "007"), instruct("二", "3.0", "x")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"question,answer\nq\n", "record 1: expected 2 cells, as in the first line, found 1"),
        (b"question,answer\nq,a,b\n", "record 1: expected 2 cells, as in the first line, found 3"),
        (b"text,text\na,b\n", "two columns are called 'text'"),
        (b"text\n\xff\n", "record 1: not UTF-8; expected text in UTF-8"),
        (b'text\n"open\n', "record 1: cannot be read: unexpected end of data"),
        (b"text\n", "expected at least one record, found none"),
        (b"question,answer\nq,\n", "record 1: field answer: expected a value, found null or an empty cell"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    assert refused(tmp_path / "a.csv").startswith(reason)


def test_a_row_that_is_no_utf8_costs_no_other(tmp_path: Path) -> None:
    rows = [b"q%d,%s" % (number, b"\xe9" if number == 5_001 else b"a") for number in range(1, 10_001)]
    (tmp_path / "a.csv").write_bytes(b"question,answer\n" + b"\n".join(rows))
    told: list[str] = []
    found = list(read(as_sources(str(tmp_path / "a.csv")), "skip", told.append))
    assert len(found) == len(rows) - 1
    assert [line for line in told if "record 5001: not UTF-8" in line]


@pytest.mark.parametrize("writer", [ipc.new_file, ipc.new_stream])
@pytest.mark.parametrize("name", ["a.arrow", "a.bin"])
def test_arrow_files_are_read_and_a_cut_is_reported(writer: Any, name: str, tmp_path: Path) -> None:
    """A stream is what `datasets` saves."""
    table = pyarrow.table({"question": ["q", "r"], "answer": ["a", "b"], "n": [1, None]})
    with writer(str(tmp_path / name), table.schema) as opened:
        opened.write_table(table, max_chunksize=1)
    assert good(tmp_path / name) == [instruct("q", "a"), instruct("r", "b")]
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-100])
    assert refused(tmp_path / name).startswith("cannot be read to its end, records may be missing: ")


def zipped(*names: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name, '{"text": "a"}')
    return packed.getvalue()


def tarred() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.json"))
    return packed.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
FOREIGN: dict[str, tuple[bytes, str]] = {
    "spreadsheet": (zipped("[Content_Types].xml", "xl/workbook.xml"), "is a spreadsheet or another Office document;"),
    "zip": (zipped("a.json"), "is a zip archive; expected it unpacked"),
    "tar": (tarred(), "is a tar archive; expected it unpacked"),
    "bzip2": (bz2.compress(b"a"), "is compressed by bzip2; "),
    "xz": (lzma.compress(b"a"), "is compressed by xz; "),
    "image": (b"\x89PNG\r\n\x1a\n\0\0", "is an image; "),
    "pdf": (b"%PDF-1.7\n", "is a PDF; "),
    "pickle": (pickle.dumps([{"text": "a"}]), "is a pickle, which is never opened; "),
    "pointer": (POINTER, "is a pointer of Git LFS, not the file; expected it after git lfs pull"),
    "page": (b"\n<!DOCTYPE html>\n<html><body>404</body></html>", "is an HTML page; "),
    "UTF-16": ('[{"text": "äa"}]'.encode("utf-16"), "is in UTF-16; expected UTF-8"),
    "UTF-16 without a mark": ('[{"text": "a"}]'.encode("utf-16-le"), "is in UTF-16; expected UTF-8"),
    "UTF-16 the other way": ('[{"text": "a"}]'.encode("utf-16-be"), "is in UTF-16; expected UTF-8"),
}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".txt", ".csv", ""])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_another_kind_is_named_for_what_it_is(kind: str, suffix: str, tmp_path: Path) -> None:
    content, reason = FOREIGN[kind]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    if (kind, suffix) == ("page", ".txt"):  # a text may be about pages
        assert {type(record) for record in good(path)} == {Pretrain}
    else:
        assert refused(path).startswith(reason)
