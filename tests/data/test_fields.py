"""No field is dropped in silence: it is used, refused by its name, or named in the report; `columns` renames any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from data.records.chat import Chat
from data.records.formats import convert
from data.records.raw_records import read_file
from data.records.reading import parse
from data.records.record import Pretrain, Record
from data.records.sources import Source
from tests.data.caches import Load
from tests.data.format_cases import ANSWER, USER, chat, instruct, refusal

QA = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        *(
            ({"messages": [USER, ANSWER], name: ["a.png"]}, f"{name}: expected records without it")
            for name in ("images", "image", "audio", "audios", "video", "videos")
        ),
        ({"messages": [USER, ANSWER | {"images": ["a.png"]}]}, "messages[1].images: expected records without it"),
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
            for name, value in (("mask", True), ("masked", 1), ("train_detail", [{"begin_offset": 0}]))
        ),
        (QA | {"choices": ["a", "b"]}, "choices: the record's format has no place for it"),
        (QA | {"options": {"A": "a"}}, "options: the record's format has no place for it"),
        ({"type": "instruct", "instruct": "i", "output": "o", "system": "s"}, "system: the record's format has no "),
        ({"type": "pretrain", "text": "t", "images": ["a.png"]}, "images: expected records without it"),
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
    assert "Pipetune trains good answers only" in refusal(raw)


@pytest.mark.parametrize(
    "extra", [{"rating": 5}, {"feedback": "good"}, {"preferred_language": "en"}, {"positive": 0.3}]
)
def test_a_field_beside_a_plain_record_that_grades_no_answer_is_named(extra: dict[str, Any]) -> None:
    assert convert(GOOD | extra | {"score": -3.5}).unused == list(extra)


def test_one_message_of_a_tree_and_a_record_with_boxes_are_refused() -> None:
    assert "one message of a dialogue" in refusal({"text": "t", "role": "prompter", "parent_id": None})
    assert refusal({"messages": [USER, ANSWER], "objects": {"bbox": [[1, 2]]}}).startswith(
        "field objects: expected rec"
    )
    assert "messages[1].reasoning_details: " in refusal({"messages": [USER, ANSWER | {"reasoning_details": "no"}]})


@pytest.mark.parametrize(
    "raw",
    [
        {"instruction": "q", "output": "a", "reasoning": "t"},
        {"input": "q", "content": "a", "reasoning_content": "t"},
        {"question": "q", "cot": "t", "answer": "a"},
        {"input": [USER], "target": "a", "thinking": "t"},
    ],
)
def test_thoughts_beside_an_answer_are_its_thoughts(raw: dict[str, Any]) -> None:
    assert convert(raw)[:2] == ([chat(USER, ANSWER | {"reasoning_content": "t"})], [])


def test_an_answer_under_other_names_is_read() -> None:
    for answer in ("output", "target", "content"):
        assert convert({"input": "q", answer: "a"}).records == [instruct("q", "a")]


def test_the_name_of_a_speaker_is_named_as_unused() -> None:
    assert convert({"messages": [USER | {"name": "Ada"}, ANSWER]}).unused == ["messages.name"]


def test_chats_as_json_in_a_column_and_other_spellings_are_read() -> None:
    assert convert({"messages": json.dumps([USER, ANSWER])}).records == [chat(USER, ANSWER)]
    turns = [{"role": "User", "text": "q"}, {"role": "Chatbot", "text": "a"}]
    assert convert({"conversations": json.dumps(turns)}).records == [chat(USER, ANSWER)]


def test_nulls_that_a_table_put_into_calls_are_left_out_and_declared_ones_stay() -> None:
    properties = {"city": {"type": "string"}, "unit": {"type": ["string", "null"], "default": None}, "other": None}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties, "required": None}}
    call = {"function": {"name": "f", "arguments": {"city": "Lima", "unit": None, "other": None}}}
    (record,) = convert({"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": [tool]}).records
    assert isinstance(record, Chat)
    assert record.messages[1].tool_calls[0].function.arguments == {"city": "Lima", "unit": None}
    assert record.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {name: properties[name] for name in ("city", "unit")},
    }


def test_a_table_and_its_jsonl_give_the_same_records(shared: Path) -> None:
    folder = shared / "cases" / "reports" / "struct-nulls"
    table, lines = (
        [parse(raw).records for raw in read_file(folder / name)] for name in ("structs.parquet", "structs_nulls.jsonl")
    )
    assert table == lines


@pytest.mark.parametrize("value", [None, "", [], {}])
@pytest.mark.parametrize("name", ["images", "history", "rejected", "context"])
def test_an_empty_field_is_no_field(name: str, value: Any) -> None:
    assert convert({"messages": [USER, ANSWER], name: value})[:2] == ([chat(USER, ANSWER)], [])


def test_what_the_record_holds_already_may_stand_there_again() -> None:
    """As `prompt` does beside the messages of UltraChat."""
    records, unused, _ = convert({"messages": [USER | {"content": "What is it?"}, ANSWER], "prompt": "What is it?"})
    assert len(records) == 1
    assert unused == ["prompt"]


def test_other_fields_are_named_but_for_those_that_nobody_would_ask_about() -> None:
    raw = QA | {"id": 7, "source": "web", "difficulty": "hard", "n_hops": 3, "weight": 1, "url": "u"}
    assert convert(raw)[:2] == ([instruct("q", "a")], ["difficulty", "n_hops", "weight"])


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


def test_a_field_in_whose_place_a_column_stands_is_named() -> None:
    raw = {"q": "q", "a": "a", "question": "other"}
    assert convert(raw, columns={"question": "q", "answer": "a"}).unused == ["question"]


def test_which_columns_a_record_has_is_known() -> None:
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
