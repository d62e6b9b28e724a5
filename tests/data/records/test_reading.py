"""Records read from files: all that are good, in order, and one line for each that is not."""

from __future__ import annotations

import gzip
import json
import pickle
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
from data.records.sources import as_sources
from data.settings import Source
from tests.conftest import FAQ
from tests.data.helpers import good, parse_record, read


def skip(*paths: Path | Source) -> tuple[list[tuple[tuple[Path, int], Record]], list[str]]:
    """Read what can be read; return the log too."""
    log: list[str] = []
    return list(read(as_sources(list(paths)), "skip", log.append)), log


def stop(*paths: Path | Source) -> list[str]:
    """The lines with which a run is refused."""
    with pytest.raises(DataError) as caught:
        list(read(as_sources(list(paths)), "stop", pytest.fail))
    return str(caught.value).split("\n")


PUBLISHED: dict[str, tuple[int, type[Record], str]] = {
    "gsm8k/train.jsonl": (7473, Instruct, "Natalia sold clips to 48 of her friends"),
    "xquad/xquad.en.json": (240, RefQA, "The Panthers defense gave up just 308 points"),
    "xquad/xquad.zh.json": (240, RefQA, "黑豹队的防守只丢了 308分"),
    "toolcall/glaive_toolcall_en_demo.json": (300, Chat, '"name": "'),
    "toolcall/glaive_toolcall_zh_demo.json": (300, Chat, '"name": "'),
    "belle_zh_seed_tasks.json": (175, Instruct, "请以下面词语为主题写一首诗"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_data_are_read_whole(name: str, shared: Path) -> None:
    count, kind, words = PUBLISHED[name]
    records = good(shared / "data" / name)
    assert (len(records), {type(record) for record in records}) == (count, {kind})
    assert words in json.dumps(records[0].model_dump(), ensure_ascii=False)
    for record in records:
        if isinstance(record, RefQA):
            assert all(str(answer) in record.reference for role, answer in record.rounds if role == "ans")


@pytest.mark.parametrize(("language", "made"), [("en", 211), ("zh", 216)])
def test_every_call_of_a_dialogue_is_read(language: str, made: int, shared: Path) -> None:
    chats = good(shared / "data" / "toolcall" / f"glaive_toolcall_{language}_demo.json")
    calls = [call for chat in chats if isinstance(chat, Chat) for each in chat.messages for call in each.tool_calls]
    assert len(calls) == made
    assert all(call.function.name for call in calls)
    assert sum(len({tool["function"]["name"] for tool in chat.tools}) for chat in chats if isinstance(chat, Chat)) > 200


def test_plain_text_is_a_record_a_line_or_a_file(shared: Path) -> None:
    path = shared / "data" / "text" / "wiki_demo.txt"
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if line.strip()]
    assert good(path) == [Pretrain(type="pretrain", text=line) for line in lines]
    assert good(path, format="text_file") == [Pretrain(type="pretrain", text=text.rstrip("\n"))]


def test_the_shipped_samples_are_read_whole() -> None:
    assert good(FAQ) == list(map(parse_record, json.loads(FAQ.read_text(encoding="utf-8"))))


def test_a_mixture_is_read_in_order_with_its_origins(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "b1"}\n\n{"text": "b3"}\n')
    instances = {"instruction": "i", "instances": [{"output": "1"}, {"output": "2"}]}
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps([instances]).encode()))
    parquet.write_table(pyarrow.table({"text": ["p1", "p2"], "note": [None, "x"]}), tmp_path / "c.parquet")
    found, log = skip(Source(path=str(tmp_path / "b.jsonl"), repeat=3), tmp_path)
    assert log == []
    first, *rest = [(file.name, number) for (file, number), _ in found]
    assert [first, rest[0]] == [("b.jsonl", 1), ("b.jsonl", 3)]
    assert rest[1:] == [("a.json.gz", 1), ("a.json.gz", 1), first, rest[0], ("c.parquet", 1), ("c.parquet", 2)]


BAD: list[tuple[bytes, str]] = [
    (b'{"text": "a",}', "not JSON: "),
    (b"text", "not JSON: "),
    (b'{"text": "\xff"}', "byte 11 is not UTF-8; expected text in UTF-8"),
    (b'{"text": "a\0"}', "not JSON: control character"),
    (b'{"text": "\\ud800"}', "not JSON: "),
    (b'{"text": NaN}', "field text: NaN is no JSON; expected a number or null"),
    (b'{"text": "a", "score": Infinity}', "field score: Infinity is no JSON; expected a number or null"),
    (b'{"text": "a", "scores": [-Infinity, 1]}', "field scores: -Infinity is no JSON; expected a number or null"),
    (b'{"text": "a\\"b\\": NaN",}', "not JSON: "),
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
    assert [number for (_, number), _ in found] == [1, 3]
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


def test_parquet_rows_become_the_same_records_as_json(tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}
    result = {"role": "tool", "content": "5", "tool_call_id": "1"}
    raws: list[dict[str, Any]] = [
        {"messages": [user, answer]},
        {"messages": [{"role": "assistant", "tool_calls": [call]}, result, answer]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, raws)))
    parquet.write_table(pyarrow.Table.from_pylist(raws), tmp_path / "a.parquet")
    assert good(tmp_path / "a.parquet") == good(tmp_path / "a.jsonl")
    parquet.write_table(pyarrow.table({"other": ["a"], "n": [3]}), tmp_path / "b.parquet")
    told = f"{tmp_path}/b.parquet: record 1: no known format has the fields 'other', 'n'; expected"
    assert stop(tmp_path / "b.parquet")[0].startswith(told)


def test_stop_shows_what_is_wrong_in_all_files_up_to_twenty_records(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.jsonl" for name in "abc")
    first.write_text('{"text": 1}\n{"text": "good"}\n{"txt": 2}\n')
    second.write_text('{"text": "good"}\n')
    third.write_text("{\n")
    *lines, last = stop(first, second, third)
    assert [line.split(": ")[:2] for line in lines] == [
        [str(first), "record 1"],
        [str(first), "record 3"],
        [str(third), "record 1"],
    ]
    assert last == "3 bad records"
    first.write_text('{"text": 1}\n' * 1000)
    line, last = stop(first)
    assert line == f"{first}: records 1 to 20: field text: expected a string, found a number"
    assert SHOWN == 20
    assert last == "20 bad records; there may be more, as no further ones were looked for"
    first.write_text('{"text": 1}\n' * 19)
    assert stop(first)[1:] == ["19 bad records"]


def test_skip_shows_twenty_and_counts_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 1}\n' * 1000 + '{"text": "good"}')
    found, log = skip(path)
    assert [number for (_, number), _ in found] == [1001]
    assert log[0] == f"skipped: {path}: records 1 to 20: field text: expected a string, found a number"
    assert log[1:-1] == []
    assert log[-1] == "1000 bad records skipped, 980 of them not shown"


def test_records_with_one_fault_share_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 1}\n{"text": "good"}\n{"text": 2}\n{"txt": "a"}\n{"text": 3}\n')
    first, second, last = stop(path)
    assert first == f"{path}: records 1, 3, 5: field text: expected a string, found a number"
    assert second.startswith(f"{path}: record 4: no known format has the fields 'txt'")
    assert last == "4 bad records"


@pytest.mark.parametrize("text", ["中文的句子。", "第一行，有 English 和 123"])
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_chinese_text_in_an_older_encoding_is_named(suffix: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    line = json.dumps({"text": text}, ensure_ascii=False) if suffix == ".jsonl" else text
    path.write_bytes(line.encode("gb18030") + b"\n")
    (refused,) = stop(path)
    how = "iconv -f GB18030 -t UTF-8 FILE > NEW writes it so"
    assert refused == f"{path}: record 1: in GBK or GB18030; expected text in UTF-8: {how}"


def test_lines_are_cut_and_printable(tmp_path: Path) -> None:
    path = tmp_path / "a\n\x1b\udcff.jsonl"
    path.write_text('{"text": 1}')
    (line,) = stop(path)
    assert line == f"{tmp_path}/a\\n\\x1b\\udcff.jsonl: record 1: field text: expected a string, found a number"
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"type": "conversation", "rounds": [["x" * 10**6, "q"]]}))
    assert len(stop(path)[0]) <= 1000


def test_raw_records_can_be_parsed_in_another_process(shared: Path) -> None:
    raws = pickle.loads(pickle.dumps(list(read_file(shared / "data" / "xquad" / "xquad.en.json"))))
    assert (len(raws), {type(raw.value) for raw in raws}) == (48, {bytes})
    assert sum(len(parse(raw, "squad").records) for raw in raws) == 240
