"""Bad records of Pipetune's own types: each gives one line that names the field and what was expected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.errors import DataError
from data.records.record import ConverHasApi, parse_record
from tests.data.helpers import ACTION, RECORDS

ROUNDS = [["ask", "q"], ["ans", "a"]]


def conversation(*rounds: Any) -> dict[str, Any]:
    return {"type": "conversation", "rounds": list(rounds)}


def with_action(**changes: Any) -> dict[str, Any]:
    """A tool-using record whose one call is changed; `None` leaves the field out."""
    action = {name: value for name, value in (ACTION | changes).items() if value is not None}
    rounds = [["ask", "q"], ["ans-api", {"actions": [action], "ans": "a"}]]
    return {"type": "conver_has_api", "api_desc": "d", "rounds": rounds}


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
def test_a_bad_record_is_named_with_its_field(record: Any, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_record(record)
    line = str(caught.value)
    assert line.startswith(reason)
    assert "\n" not in line


@pytest.mark.parametrize("name", RECORDS)
def test_unknown_fields_are_left_alone(name: str) -> None:
    assert parse_record(RECORDS[name] | {"id": 7, "source": None}) == parse_record(RECORDS[name])


def test_api_params_are_the_same_as_an_object_and_as_a_string() -> None:
    as_object = parse_record(with_action())
    assert isinstance(as_object, ConverHasApi)
    assert as_object == parse_record(with_action(api_param=json.dumps(ACTION["api_param"])))
