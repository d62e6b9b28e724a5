"""No field is dropped in silence: it is used, refused by its name, or named in the report; `columns` renames any."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from data.records.formats import convert
from data.records.record import Pretrain, Record
from data.settings import Source
from tests.data.caches import Load
from tests.data.records.format_cases import ANSWER, USER, chat, instruct, refusal

QA = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        *(
            ({"messages": [USER, ANSWER], name: ["a.mp4"]}, f"{name}: expected records without it")
            for name in ("audio", "audios", "video", "videos", "objects")
        ),
        ({"messages": [USER, ANSWER], "image": "a.png"}, "image: 1 image, but 0 places for them"),
        ({"messages": [USER, ANSWER | {"images": ["a.png"]}]}, "messages[1].images: expected images beside the mess"),
        ({"text": "t", "label": 1}, "label: the record's format has no place for it"),
        ({"messages": [USER, ANSWER], "weight": 0.5}, "weight: the record's format has no place for it"),
        ({"messages": [USER, ANSWER], "history": [["r", "b"]]}, "history: the record's format has no place for it"),
        (QA | {"reasoning": "on"}, "reasoning: expected the thoughts of the answer, found 'on'"),
        ({"type": "pretrain", "text": "t", "cot": "c"}, "cot: the record's format has no place for it"),
        (QA | {"context": "c", "passage": "d"}, "passage: the record's format has no place for it"),
        (QA | {"train": False}, "train: the record's format has no place for it"),
        (QA | {"loss_weight": 0.5}, "loss_weight: the record's format has no place for it"),
        *(
            (
                {"messages": [USER, ANSWER | {name: value}]},
                f"messages[1].{name}: the record's format has no place for it",
            )
            for name, value in (("mask", True), ("masked", 1), ("train_detail", [{}]), ("reasoning_details", "no"))
        ),
        (QA | {"choices": ["a", "b"]}, "choices: the record's format has no place for it"),
        (QA | {"options": {"A": "a"}}, "options: the record's format has no place for it"),
        ({"type": "instruct", "instruct": "i", "output": "o", "system": "s"}, "system: the record's format has no "),
        ({"type": "pretrain", "text": "<image>", "images": ["a.png"]}, "images: expected records without images"),
    ],
)
def test_a_field_that_matters_is_used_or_refused_by_its_name(raw: dict[str, Any], name: str) -> None:
    assert refusal(raw).startswith(f"field {name}")


GOOD = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ({"prompt": "q", "completion": "a", "label": False}, "label"),
        ({"prompt": "q", "completion": "a", "label": True}, "label"),
        ({"messages": [USER, ANSWER], "kto_tag": False}, "kto_tag"),
        ({"messages": [USER, ANSWER], "chosen": [ANSWER], "rejected": [ANSWER]}, "chosen, rejected"),
        ({"instruction": "i", "output": "o", "rejected_response": "n"}, "rejected_response"),
        (GOOD | {"desirable": False}, "desirable"),
        ({"messages": [USER, ANSWER], "rejected_messages": [ANSWER]}, "rejected_messages"),
        ({"messages": [USER, ANSWER], "negative_messages": [[ANSWER]]}, "negative_messages"),
        (GOOD | {"response_a": "a", "response_b": "b", "winner": "a"}, "winner, response_a, response_b"),
        ({"conversation_a": [USER], "conversation_b": [USER]}, "conversation_a, conversation_b"),
        (GOOD | {"rating": -1}, "rating"),
        (GOOD | {"feedback": "bad"}, "feedback"),
        ({"conversations": [USER], "chosen": ANSWER, "rejectedResponse": ANSWER}, "chosen, rejectedResponse"),
        ({"input": {}, "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]}, "preferred_output, non_prefe"),
        ({"instruction": "q", "completions": [{"response": "a", "score": 1}]}, "completions"),
    ],
)
def test_graded_answers_are_refused_under_any_name(raw: dict[str, Any], names: str) -> None:
    assert refusal(raw).startswith(f"preference data (fields {names}")
    assert "expected the key preference, or good answers alone" in refusal(raw)
    marked = names in ("label", "kto_tag", "desirable")
    assert refusal(raw).endswith("preference: kto learns from marked answers") == marked


@pytest.mark.parametrize(
    "extra", [{"rating": 5}, {"feedback": "good"}, {"preferred_language": "en"}, {"positive": 0.3}]
)
def test_a_field_beside_a_plain_record_that_grades_no_answer_is_named(extra: dict[str, Any]) -> None:
    assert convert(GOOD | extra | {"score": -3.5}).unused == list(extra)


@pytest.mark.parametrize("value", [None, "", [], {}])
@pytest.mark.parametrize("name", ["images", "history", "rejected", "context"])
def test_an_empty_field_is_no_field(name: str, value: Any) -> None:
    assert convert({"messages": [USER, ANSWER], name: value})[:2] == ([chat(USER, ANSWER)], [])


def test_what_the_record_holds_already_may_stand_there_again() -> None:
    """As `prompt` does beside the messages of UltraChat."""
    records, unused, *_ = convert({"messages": [USER | {"content": "What is it?"}, ANSWER], "prompt": "What is it?"})
    assert len(records) == 1
    assert unused == ["prompt"]


def test_other_fields_are_named_but_for_those_that_nobody_would_ask_about() -> None:
    raw = QA | {"id": 7, "source": "web", "difficulty": "hard", "n_hops": 3, "weight": 1, "url": "u"}
    assert convert(raw)[:2] == ([instruct("q", "a")], ["difficulty", "n_hops", "weight"])
    assert convert({"messages": [USER | {"name": "Ada"}, ANSWER]}).unused == ["messages.name"]


COLUMNS: list[tuple[dict[str, str], dict[str, Any], list[Record]]] = [
    ({"prompt": "my_question", "completion": "chosen"}, {"my_question": "q", "chosen": "a"}, [instruct("q", "a")]),
    (
        {"question": "q", "answer": "a"},
        {"q": "q", "a": "a", "rejected": "n", "question": "other"},
        [instruct("q", "a")],
    ),
    ({"text": "content"}, {"content": "t", "title": "x"}, [Pretrain(type="pretrain", text="t")]),
    (
        {"messages": "dialog", "role": "who", "content": "says", "user": "customer", "assistant": "agent"},
        {
            "dialog": [
                {"who": "customer", "says": "q"},
                {"who": "agent", "says": "a", "loss": False},
                {"who": "agent", "says": "a"},
            ]
        },
        [chat(USER, ANSWER | {"weight": 0}, ANSWER)],
    ),
    (
        {"role": "speaker", "content": "text", "system": "setup"},
        {
            "messages": [
                {"speaker": "setup", "text": "s"},
                {"speaker": "user", "text": "q"},
                {"speaker": "assistant", "text": "a"},
            ]
        },
        [chat({"role": "system", "content": "s"}, USER, ANSWER)],
    ),
    (
        {"user": "customer", "assistant": "agent"},
        {"messages": [{"role": "customer", "content": "q"}, {"role": "agent", "content": "a"}]},
        [chat(USER, ANSWER)],
    ),
    (
        {"user": "customer", "assistant": "agent", "conversations": "talk"},
        {"talk": [{"from": "customer", "value": "q"}, {"from": "agent", "value": "a"}]},
        [chat(USER, ANSWER)],
    ),
    ({"instruction": "task", "input": "data", "output": "result"}, {"task": "i", "result": "o"}, [instruct("i", "o")]),
]


@pytest.mark.parametrize(("columns", "raw", "expected"), COLUMNS)
def test_columns_name_the_fields_of_any_file(
    columns: dict[str, str], raw: dict[str, Any], expected: list[Record]
) -> None:
    assert convert(raw, columns=columns).records == expected


def test_a_column_that_is_missing_is_named() -> None:
    line = refusal({"q": "q", "b": "a"}, columns={"question": "q", "answer": "a"})
    assert line.startswith("no known format has the fields 'b', 'question'; expected columns that name them")


@pytest.mark.parametrize(
    ("raw", "columns", "name"),
    [
        ({"q": "q", "a": "a", "c": "c"}, {"prompt": "q", "completion": "a", "context": "c"}, "context"),
        ({"q": "q", "a": "a", "completion": "b"}, {"prompt": "q", "response": "a"}, "response"),
        ({"instruction": "i", "o": "o", "c": "c"}, {"output": "o", "answers": "c"}, "answers"),
    ],
)
def test_what_columns_names_has_a_place(raw: dict[str, Any], columns: dict[str, str], name: str) -> None:
    line = refusal(raw, columns=columns)
    assert line == f"field {name}: the record's format has no place for it; expected no column {columns[name]} for it"
    assert convert(raw | {columns[name]: ""}, columns=columns).records


def test_a_bad_answer_stays_one_whatever_its_columns_are_called() -> None:
    columns = {"prompt": "q", "completion": "a"}
    for name in ("label", "kto_tag"):
        assert refusal({"q": "q", "a": "a", name: False}, columns=columns).startswith(
            f"preference data (fields {name}): "
        )
        assert convert({"q": "q", "a": "a", name: True}, columns=columns).unused == [name]


def test_which_columns_a_record_has_is_known() -> None:
    raw = {"q": "q", "a": "a", "question": "other"}  # in whose place a column stands
    assert convert(raw, columns={"question": "q", "answer": "a"}).unused == ["question"]
    columns = {"question": "q", "answer": "a", "context": "c", "user": "customer"}
    assert convert({"q": "q", "a": "a"}, columns=columns).columns == ["q", "a"]
    talk = {"messages": [{"role": "customer", "content": "q"}, ANSWER]}
    assert convert(talk, columns=columns).columns == ["customer"]
    assert convert({"question": "q", "answer": "a"}).columns == []


def test_a_column_that_no_record_has_is_refused(tmp_path: Path, load: Load) -> None:
    """One that some have is fine: single records may lack it, files of a glob, too."""
    columns = {"question": "q", "answer": "a", "context": "c"}
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "q", "a": "a"}\n{"q": "r", "a": "b"}\n')
    other = tmp_path / "b.jsonl"
    other.write_text('{"q": "q", "a": "a", "c": "see"}\n')
    with pytest.raises(DataError) as caught:
        load(Source(path=str(path), columns=columns))
    assert str(caught.value) == f"{path}: columns: no record has 'c'; expected what some call their context"
    assert len(load([Source(path=str(path), columns=columns), Source(path=str(other), columns=columns)])) == 3
    for unused in ({"user": "customer"}, {"role": "who"}):
        with pytest.raises(DataError, match=r"columns: no record has '(customer|who)'; expected"):
            load(Source(path=str(other), columns={"question": "q", "answer": "a"} | unused))
    (tmp_path / "c.txt").write_text("q a\n")
    with pytest.raises(DataError, match="columns: no record has 'q'"):
        load(Source(path=str(tmp_path / "c.txt"), columns={"question": "q"}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"api_res": None}, "api_res: expected a string, an object or a list, found null"),
        ({"api_res": 3}, "api_res: expected a string, an object or a list, found a number"),
        ({"api_res": [math.inf]}, "api_res: an infinite number, or none at all; expected numbers that JSON has"),
        ({"api_param": {"a": [-math.inf]}}, "api_param: an infinite number, or none at all; expected numbers that"),
        ({"api_param": '{"a": 1e999}'}, "api_param: an infinite number, or none at all; expected numbers that JSON"),
    ],
)
def test_what_is_no_json_in_a_call_is_refused_by_its_name(change: dict[str, Any], complaint: str) -> None:
    action = {"inner_thought": "", "api_name": "f", "api_param": {}, "api_res": ""} | change
    rounds = [["ask", "Q"], ["ans-api", {"actions": [action], "ans": "A"}]]
    with pytest.raises(DataError, match=f"^{re.escape(f'field rounds[1][1].actions[0].{complaint}')}"):
        convert({"type": "conver_has_api", "api_desc": "f()", "rounds": rounds})
