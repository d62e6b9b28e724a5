"""Bad record files: each gives one line that names the file, the record, the field and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from data.records import ConverHasApi, Pretrain, parse_record, read_records
from tests.data.helpers import ACTION, RECORDS

GOOD = {"type": "pretrain", "text": "fine"}
ROUNDS = [["ask", "q"], ["ans", "a"]]


def refusal(path: Path) -> str:
    """The one line with which a file is refused, without the file's name that it begins with."""
    with pytest.raises(DataError) as caught:
        read_records(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return line.removeprefix(f"{path}: ")


def conversation(*rounds: Any) -> dict[str, Any]:
    return {"type": "conversation", "rounds": list(rounds)}


def with_action(**changes: Any) -> dict[str, Any]:
    """A tool-using record whose one call is changed; `None` leaves the field out."""
    action = {name: value for name, value in (ACTION | changes).items() if value is not None}
    rounds = [["ask", "q"], ["ans-api", {"actions": [action], "ans": "a"}]]
    return {"type": "conver_has_api", "api_desc": "d", "rounds": rounds}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "line 1, column 1: not JSON"),
        (b'[\n  {"type": "pretrain",}\n]', "line 2, column 23: not JSON"),
        (b'[{"type": "pretrain", "text": "a"}] x', "line 1, column 37: not JSON"),
        (b'["\xff"]', "byte 2: not UTF-8; expected a JSON file in UTF-8"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"type": "pretrain"}', "expected a list of records, found an object"),
        (b'"text"', "expected a list of records, found a string"),
        (b"null", "expected a list of records, found null"),
        (b"[]", "expected at least one record, found an empty list"),
        (b'[{"type": "pretrain", "text": "a", "id": ' + b"1" * 5000 + b"}]", ""),
    ],
)
def test_a_file_that_holds_no_records_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    path.write_bytes(content)
    assert refusal(path).startswith(reason)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.json") == "not found; expected a JSON file with a list of records"
    assert refusal(tmp_path).startswith("cannot be read")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (1, "expected an object with a type, found a number"),
        (None, "expected an object with a type, found null"),
        (["pretrain"], "expected an object with a type, found a list"),
        ({}, "field type: missing; expected one of pretrain, instruct, conversation"),
        ({"type": "alpaca"}, "field type: expected one of pretrain, instruct, conversation"),
        ({"type": 5}, "field type: expected one of pretrain"),
        ({"type": ["pretrain"]}, "field type: expected one of pretrain"),
        ({"type": "pretrain"}, "field text: missing"),
        ({"type": "pretrain", "text": ""}, "field text: "),
        ({"type": "pretrain", "text": ["a"]}, "field text: expected a string, found a list"),
        ({"type": "pretrain", "text": "\ud800"}, "field text: expected a string"),
        ({"type": "instruct", "output": "b"}, "field instruct: missing"),
        ({"type": "instruct", "instruct": "a"}, "field output: missing"),
        ({"type": "instruct", "instruct": "a", "output": None}, "field output: expected a string, found null"),
        ({"type": "instruct", "instruct": "a", "output": "b", "input": {}}, "field input: expected a string, found an"),
        ({"type": "conversation"}, "field rounds: missing"),
        ({"type": "conversation", "rounds": {"ask": "q"}}, "field rounds: expected a list, found an object"),
        (conversation(), "field rounds: "),
        (conversation(["ask"]), "field rounds[0]: expected a pair of role and text"),
        (conversation("ab"), "field rounds[0]: expected a pair of role and text"),
        (conversation(["user", "q"]), "field rounds[0][0]: expected one of ask, ans, found 'user'"),
        (conversation(["ans", "a"]), "field rounds[0][0]: expected the first round to be an ask, found 'ans'"),
        (conversation(["ask", "q"], ["ask", "r"]), "field rounds: expected at least one answer, found asks only"),
        (conversation(["ask", 3], ["ans", "a"]), "field rounds[0][1]: expected a string, found a number"),
        (conversation(["ask", "q"], ["ans", 4]), "field rounds[1][1]: expected a string, found a number"),
        (conversation(*ROUNDS, ["ans-api", {}]), "field rounds[2][0]: expected one of ask, ans, found 'ans-api'"),
        ({"type": "ref_qa", "rounds": ROUNDS}, "field reference: missing"),
        ({"type": "ref_qa", "reference": "r"}, "field rounds: missing"),
        ({"type": "ref_qa", "reference": "r", "rounds": ROUNDS[:1]}, "field rounds: expected at least one answer"),
        ({"type": "conver_has_api", "rounds": ROUNDS}, "field api_desc: missing"),
        ({"type": "conver_has_api", "api_desc": "d", "rounds": [["ask", "q"], ["ans-api", "a"]]}, "field rounds[1][1]"),
        (with_action(inner_thought=None), "field rounds[1][1].actions[0].inner_thought: missing"),
        (with_action(api_name=7), "field rounds[1][1].actions[0].api_name: expected a string, found a number"),
        (with_action(api_param=[1]), "field rounds[1][1].actions[0].api_param: expected "),
        (with_action(api_param="{bad"), "field rounds[1][1].actions[0].api_param: expected an object or a JSON string"),
        (with_action(api_param="[1]"), "field rounds[1][1].actions[0].api_param: expected "),
    ],
)
def test_a_bad_record_is_named_with_its_number_and_field(record: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    path.write_text(json.dumps([GOOD, record, {"type": "never looked at"}]), encoding="utf-8")
    assert refusal(path).startswith(f"record 2: {reason}")


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    path.write_text(json.dumps([GOOD]), encoding="utf-8-sig")
    assert read_records(path) == [Pretrain(type="pretrain", text="fine")]


@pytest.mark.parametrize("name", RECORDS)
def test_unknown_fields_are_left_alone(name: str) -> None:
    assert parse_record(RECORDS[name] | {"id": 7, "source": None}) == parse_record(RECORDS[name])


def test_api_params_are_the_same_as_an_object_and_as_a_string() -> None:
    as_object = parse_record(with_action())
    assert isinstance(as_object, ConverHasApi)
    assert as_object == parse_record(with_action(api_param=json.dumps(ACTION["api_param"])))


def test_several_files_are_read_in_order_and_the_bad_one_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "b.json", tmp_path / "a.json"
    first.write_text(json.dumps([GOOD, GOOD | {"text": "two"}]), encoding="utf-8")
    second.write_text(json.dumps([GOOD | {"text": "three"}]), encoding="utf-8")
    records = [record for record in read_records([first, str(second)]) if isinstance(record, Pretrain)]
    assert [record.text for record in records] == ["fine", "two", "three"]
    second.write_text("[{}]", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_records([first, second])
    assert str(caught.value).startswith(f"{second}: record 1: field type: missing")
