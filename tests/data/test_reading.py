"""Records read from files: all that are good, in order, and one line for each that is not."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from data.errors import DataError
from data.records.chat import Chat
from data.records.raw_records import read_file
from data.records.reading import SHOWN, parse
from data.records.record import Instruct, Pretrain, Record, RefQA
from data.records.sources import Source, as_sources
from tests.conftest import FAQ
from tests.data.helpers import parse_record, read


def skip(*paths: Path | Source) -> tuple[list[tuple[tuple[Path, int], Record]], list[str]]:
    """What is read when bad records are skipped, and what the log says."""
    log: list[str] = []
    return list(read(as_sources(list(paths)), "skip", log.append)), log


def stop(*paths: Path | Source) -> list[str]:
    """The lines with which a run is refused."""
    with pytest.raises(DataError) as caught:
        list(read(as_sources(list(paths)), "stop", pytest.fail))
    return str(caught.value).split("\n")


def good(path: Path, expect: int, **options: Any) -> list[Record]:
    """All the records of files without a mistake."""
    found = list(read([Source(path=str(path), **options)], "stop", pytest.fail))
    assert len(found) == expect
    return [record for _, record in found]


def test_gsm8k_is_instructions(shared: Path) -> None:
    records = good(shared / "data" / "gsm8k" / "train.jsonl", 7473)
    assert isinstance(records[0], Instruct)
    assert records[0].instruct.startswith("Natalia sold clips to 48 of her friends")
    assert records[0].output.endswith("#### 72")
    assert {record.type for record in records} == {"instruct"}


def test_xquad_is_reference_questions(shared: Path) -> None:
    for language in ("en", "zh"):
        records = good(shared / "data" / "xquad" / f"xquad.{language}.json", 240)
        assert all(isinstance(record, RefQA) for record in records)
        answered = [
            (record.reference, str(answer))
            for record in records
            if isinstance(record, RefQA)
            for role, answer in record.rounds
            if role == "ans"
        ]
        assert len(answered) == 1190
        assert all(answer in reference for reference, answer in answered)


@pytest.mark.parametrize(("language", "calls"), [("en", 211), ("zh", 216)])
def test_tool_dialogues_are_chats(language: str, calls: int, shared: Path) -> None:
    records = good(shared / "data" / "toolcall" / f"glaive_toolcall_{language}_demo.json", 300)
    chats = [record for record in records if isinstance(record, Chat)]
    assert len(chats) == 300
    made = [call for chat in chats for message in chat.messages for call in message.tool_calls]
    assert len(made) == calls
    assert all(call.function.arguments is not None and call.function.name for call in made)
    known = [{tool["function"]["name"] for tool in chat.tools} for chat in chats]
    assert sum(map(len, known)) > 200


def test_belle_is_instructions(shared: Path) -> None:
    records = good(shared / "data" / "belle_zh_seed_tasks.json", 175)
    assert isinstance(records[0], Instruct)
    assert (records[0].instruct, records[0].input) == ("请以下面词语为主题写一首诗", "夏天")


def test_plain_text_is_a_record_a_line_or_a_file(shared: Path) -> None:
    path = shared / "data" / "text" / "wiki_demo.txt"
    lines = path.read_text(encoding="utf-8").split("\n")
    records = good(path, sum(bool(line.strip()) for line in lines))
    assert isinstance(records[1], Pretrain)
    assert records[1].text == lines[1]
    (whole,) = good(path, 1, format="text_file")
    assert isinstance(whole, Pretrain)
    assert whole.text == "\n".join(lines).rstrip("\n")


def test_a_mixture_is_read_in_order_with_its_origins(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "b1"}\n\n{"text": "b3"}\n')
    (tmp_path / "a.json.gz").write_bytes(
        gzip.compress(
            b'[{"instruction": "i", "instances": [%s]}]' % b",".join([b'{"output": "1"}', b'{"output": "2"}'])
        )
    )
    parquet.write_table(pyarrow.table({"text": ["p1", "p2"], "note": [None, "x"]}), tmp_path / "c.parquet")
    found, log = skip(Source(path=str(tmp_path / "b.jsonl"), repeat=3), tmp_path)
    assert log == []
    assert [(file.name, number, record.type) for (file, number), record in found] == [
        ("b.jsonl", 1, "pretrain"),
        ("b.jsonl", 3, "pretrain"),
        ("a.json.gz", 1, "instruct"),
        ("a.json.gz", 1, "instruct"),
        ("b.jsonl", 1, "pretrain"),
        ("b.jsonl", 3, "pretrain"),
        ("c.parquet", 1, "pretrain"),
        ("c.parquet", 2, "pretrain"),
    ]


BAD: list[tuple[bytes, str]] = [
    (b'{"text": "a",}', "not JSON: "),
    (b"text", "not JSON: "),
    (b'{"text": "\xff"}', "byte 11 is not UTF-8; expected text in UTF-8"),
    (b'{"text": "a\0"}', "not JSON: control character"),
    (b'{"text": "\\ud800"}', "not JSON: "),
    (b'{"text": NaN}', "field text: NaN is no JSON; expected a number or null"),
    (b'{"text": "a", "score": Infinity}', "field score: Infinity is no JSON; expected a number or null"),
    (b'{"text": ' + b"[" * 100_000, "not JSON: recursion limit exceeded"),
    (b'{"text": ' + b"1" * 100_000 + b"}", "not JSON: number out of range"),
    (b'{"text": 5}', "field text: expected a string, found a number"),
    (b'["text"]', "expected an object, found a list"),
    (b'{"txt": "a"}', "no known format has the fields 'txt'; expected columns that name them, or those of one of: pip"),
    (b'{"a\\u001b[31m\\r\\nb": "a"}', "no known format has the fields 'a\\x1b[31m\\r\\nb'; "),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_line_is_named_and_the_others_are_read(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "three"}\n')
    found, log = skip(path)
    assert [(number, record.type) for (_, number), record in found] == [(1, "pretrain"), (3, "pretrain")]
    assert log[0].startswith(f"skipped: {path}: record 2: {reason}")
    assert log[1:] == ["1 bad record skipped"]
    (refused,) = stop(path)
    assert refused.startswith(f"{path}: record 2: {reason}")
    assert refused.isprintable()


def test_a_bad_line_of_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntw\0o\nthr\xffee\nfour\r\n")
    found, log = skip(path)
    assert [record.text for _, record in found if isinstance(record, Pretrain)] == ["one", "four"]
    assert log == [
        f"skipped: {path}: record 2: byte 3 is NUL; expected plain text",
        f"skipped: {path}: record 3: byte 4 is not UTF-8; expected text in UTF-8",
        "2 bad records skipped",
    ]


def test_parquet_without_the_columns_is_refused_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"other": ["a"], "n": [3]}), path)
    assert stop(path)[0].startswith(f"{path}: record 1: no known format has the fields 'other', 'n'; expected")


def test_parquet_rows_become_the_same_records_as_json(tmp_path: Path) -> None:
    raws: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
                {"role": "tool", "content": "5", "tool_call_id": "1"},
                {"role": "assistant", "content": "b"},
            ]
        },
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, raws)))
    parquet.write_table(pyarrow.Table.from_pylist(raws), tmp_path / "a.parquet")
    assert good(tmp_path / "a.parquet", 2) == good(tmp_path / "a.jsonl", 2)


def test_stop_shows_all_that_are_wrong_in_all_files(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.jsonl" for name in "abc")
    first.write_text('{"text": 1}\n{"text": "good"}\n{"text": 2}\n')
    second.write_text('{"text": "good"}\n')
    third.write_text("{\n")
    lines = stop(first, second, third)
    assert [line.split(": ")[:2] for line in lines] == [
        [str(first), "record 1"],
        [str(first), "record 3"],
        [str(third), "record 1"],
        ["3 bad records"],
    ]


def test_stop_looks_for_no_more_than_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 1}\n' * 1000)
    *lines, last = stop(path)
    assert len(lines) == SHOWN == 20
    assert last == "20 bad records; there may be more, as no further ones were looked for"
    path.write_text('{"text": 1}\n' * 19)
    assert stop(path)[19:] == ["19 bad records"]


def test_skip_shows_twenty_and_counts_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 1}\n' * 1000 + '{"text": "good"}')
    found, log = skip(path)
    assert [number for (_, number), _ in found] == [1001]
    assert len(log) == 21
    assert log[-1] == "1000 bad records skipped, 980 of them not shown"


def test_lines_are_cut_and_printable(tmp_path: Path) -> None:
    path = tmp_path / "a\n\x1b\udcff.jsonl"
    path.write_text('{"text": 1}')
    (line,) = stop(path)
    assert line == f"{tmp_path}/a\\n\\x1b\\udcff.jsonl: record 1: field text: expected a string, found a number"
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"type": "conversation", "rounds": [["x" * 10**6, "q"]]}))
    assert len(stop(path)[0]) <= 1000


def test_missing_paths_are_refused_whatever_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not found"):
        skip(tmp_path / "none.json")


def test_the_shipped_samples_are_read_whole() -> None:
    raw = json.loads(FAQ.read_text(encoding="utf-8"))
    assert good(FAQ, len(raw)) == list(map(parse_record, raw))


def test_raw_records_can_be_parsed_elsewhere(shared: Path) -> None:
    """They are plain values, so they travel to worker processes."""
    import pickle

    raws = pickle.loads(pickle.dumps(list(read_file(shared / "data" / "xquad" / "xquad.en.json"))))
    assert len(raws) == 48
    kinds = Counter(type(raw.value) for raw in raws)
    assert kinds == {bytes: 48}
    assert sum(len(parse(raw, "squad").records) for raw in raws) == 240
