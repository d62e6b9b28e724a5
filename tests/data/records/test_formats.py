"""Every published layout becomes the right record of Pipetune; what fits none is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from data.images.in_records import NAMES
from data.records.formats import FORMATS, OWN, PARTS, convert
from data.records.raw_records import read_file
from data.records.reading import parse
from data.records.record import Record
from data.settings import COLUMNS, FORMAT_NAMES
from data.tokenized.tokenize import encode_many
from tests.data.helpers import ACTION, FIELDS, RECORDS, REWRITING, parse_record
from tests.data.records.format_cases import (
    ANSWER,
    CALL,
    CALLING,
    CASES,
    JSON,
    RESULT,
    SYSTEM,
    TOOL,
    USER,
    chat,
    instruct,
    ref_qa,
    refusal,
    sent,
)

# Parts of messages: Anthropic's, and a model's refusal.
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
WORDS = {"type": "text", "text": "a"}
USE = {"type": "tool_use", "id": "1", "name": CALL["name"], "input": CALL["arguments"]}
GIVEN = {"type": "tool_result", "tool_use_id": "1", "content": [{"text": "rain"}]}
NO = {"type": "refusal", "refusal": "I can't."}
THINKING = ANSWER | {"reasoning_content": "hm"}
USING = {"role": "assistant", "tool_calls": [{"id": "1", "function": CALL}]}
USED = RESULT | {"tool_call_id": "1"}
NO_TEXT = "expected a text or a list of parts with a text each"
ROUNDS = [["ask", "q"], ["ans", "a"]]


def said(role: str, *parts: JSON) -> JSON:
    return {"role": role, "content": list(parts)}


def test_every_format_is_tested() -> None:
    assert set(CASES) == set(FORMAT_NAMES)


def test_the_settings_name_the_formats_and_the_fields_that_there_are() -> None:
    assert ("pipetune", *FORMATS) == FORMAT_NAMES
    every = [*FORMATS.values(), *OWN.values()]
    fields = {name for each in every for names in each.fields.values() for name in names}
    assert fields | {*PARTS} | FIELDS | {*NAMES} == COLUMNS


@pytest.mark.parametrize(
    ("name", "raw", "expected"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_a_layout_is_recognised_converted_and_encoded(
    name: str, raw: JSON, expected: list[Record], tokenizer: PreTrainedTokenizerBase
) -> None:
    assert convert(raw).records == expected
    assert convert(raw, name).records == expected
    (given,) = encode_many([raw], tokenizer, REWRITING)
    if len(expected) == 1:
        assert str([given]) == str(encode_many(expected, tokenizer, REWRITING))
    else:
        assert str(given) == f"expected an object that makes one record, found one that makes {len(expected)}"


@pytest.mark.parametrize("name", RECORDS)
def test_pipetunes_own_types_are_recognised_and_unknown_fields_are_left_alone(name: str) -> None:
    (record,), unused, *_ = convert(RECORDS[name] | {"id": 7, "source": None})
    assert not unused
    assert record.type == RECORDS[name]["type"]
    assert record == parse_record(RECORDS[name])


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"conversations": ["q", "a"]}, chat(USER, ANSWER)),
        ({"conversations": '["q", "a", "q", "a"]'}, chat(USER, ANSWER, USER, ANSWER)),
        ({"conversation": [{"input": "q", "output": "a"}] * 2}, chat(USER, ANSWER, USER, ANSWER)),
        ({"conversations": json.dumps([sent("User", "q"), {"role": "Chatbot", "text": "a"}])}, chat(USER, ANSWER)),
        ({"messages": [USER, ANSWER], "system": [{"text": "s"}, {"text": ""}]}, chat(SYSTEM, USER, ANSWER)),
        ({"instruction": "q", "output": "a", "system": [{"text": "s"}]}, chat(SYSTEM, USER, ANSWER)),
        # null is as good as absent
        (
            {
                "messages": [
                    each | dict.fromkeys(("weight", "tool_calls", "name", "reasoning_content", "train"))
                    for each in (USER, ANSWER)
                ]
            },
            chat(USER, ANSWER),
        ),
        *(
            ({"messages": [USER | {"content": content}, ANSWER]}, chat(USER, ANSWER))
            for text in [{"type": "text", "text": "q"}]
            for content in (text, {"text": "q"}, [text], [text | {"image": None}], [{"type": None, "text": "q"}])
        ),
        # what a tool gives back, and what an assistant says in words and calls
        (
            {"messages": [USER, CALLING, RESULT | {"content": {"rain": True}}, ANSWER]},
            chat(USER, CALLING, RESULT | {"content": '{"rain": true}'}, ANSWER),
        ),
        *(
            ({"messages": [USER, {who: "tool_call", what: json.dumps(CALL)}, ANSWER]}, chat(USER, CALLING, ANSWER))
            for who, what in (("role", "content"), ("from", "value"))
        ),
        *(
            ({"prompt": prompt, "completion": [answer]}, chat(USER | {"weight": 0}, answer))
            for answer in (ANSWER | {"thinking": "t"}, ANSWER | {"tool_calls": [{"function": CALL}]})
            for prompt in ("q", [USER])
        ),
        # what the chat template gets
        *(
            ({"messages": [USER, ANSWER], "chat_template_kwargs": given}, chat(USER, ANSWER))
            for given in ({}, {"thinking": None}, "", "{}")
        ),
        *(
            (raw | {"chat_template_kwargs": given}, chat(USER, ANSWER, chat_template_kwargs={"thinking": False}))
            for given in ({"thinking": False, "budget": None}, '{"thinking": false}')
            for raw in ({"conversations": [USER, ANSWER]}, {"prompt": "q", "completion": "a"})
        ),
        # parts
        ({"messages": [USER, said("assistant", WORDS, NO)]}, chat(USER, ANSWER | {"content": "aI can't."})),
        ({"messages": [USER, {"role": "assistant", "content": None, "refusal": "a"}]}, chat(USER, ANSWER)),
        ({"messages": [USER, said("assistant", THOUGHT, WORDS)]}, chat(USER, THINKING)),
        ({"conversations": [USER, said("assistant", USE)]}, chat(USER, USING)),
        (
            {"messages": [USER, said("assistant", WORDS, USE), said("user", GIVEN), ANSWER], "tools": [TOOL]},
            chat(USER, USING | {"content": "a"}, USED, ANSWER, tools=[TOOL]),
        ),
        (
            {"messages": [USER, said("assistant", USE) | {"weight": 0}, said("user", GIVEN, WORDS), ANSWER]},
            chat(USER, USING | {"weight": 0}, USED, USER | {"content": "a"}, ANSWER),
        ),
        (RECORDS["api_param as a string"], parse_record(RECORDS["api_param as a string"])),
    ],
)
def test_what_can_mean_one_thing_alone_is_read(raw: JSON, expected: Record) -> None:
    assert convert(raw).records == [expected]


def test_format_decides_where_fields_of_several_are_there() -> None:
    both: JSON = {"question": "q", "answer": "b", "context": "c", "answers": ["b"]}
    assert convert(both).records == [ref_qa("c", "q", "b")]
    assert convert(both | {"answers": []}, "question_answer").records == [ref_qa("c", "q", "b")]
    assert refusal(both | {"answer": "other"}).startswith("field answer: the record's format has no place for it")


def test_columns_are_named_in_what_is_said_of_a_question() -> None:
    columns = {"prompt": "Frage", "completion": "Antwort"}
    line = refusal({"Frage": "", "Antwort": "a"}, columns=columns)
    assert line == "field Frage: expected a text of at least 1 character, found ''"


def test_a_record_of_no_layout_is_refused_with_its_fields_and_the_formats() -> None:
    line = refusal({"id": 1, "one": "a", "other": "b"})
    assert line.startswith("no known format has the fields 'id', 'one', 'other'; expected columns that ")
    assert all(f"{name} ({known})" in line for name, known in FORMATS.items())
    assert "pipetune (type); " in line and "alpaca (instruction, output|response)" in line
    assert "no known format has the fields (none); " in refusal({})
    many = refusal({"x" * 1000 + str(number): 0 for number in range(1000)})
    assert "..." in many and len(many) < 2000


def conversation(*rounds: Any) -> JSON:
    return {"type": "conversation", "rounds": list(rounds)}


def with_action(**changes: Any) -> JSON:
    """A tool-using record whose one call is changed; `None` leaves the field out."""
    action = {name: value for name, value in (ACTION | changes).items() if value is not None}
    rounds = [["ask", "q"], ["ans-api", {"actions": [action], "ans": "a"}]]
    return {"type": "conver_has_api", "api_desc": "d", "rounds": rounds}


# By the beginning of the line that refuses them.
REFUSED: dict[str, list[Any]] = {
    # Pipetune's own types
    "expected an object, found null": [None],
    "expected an object, found a list": [[]],
    "field type: expected one of pretrain, instruct, conversation, conver_has_api, ref_qa, found": [
        {"type": "alpaca"},
        {"type": 5},
        {"type": "x" * 10_000},
    ],
    "field text: expected a text of at least 1 character, found ''": [{"type": "pretrain", "text": ""}, {"text": ""}],
    "field text: expected a string": [{"type": "pretrain", "text": "\ud800"}, {"text": float("nan")}],
    "field output: expected a value, found null or an empty cell": [
        {"type": "instruct", "instruct": "a", "output": None},
        {"instruction": "i", "output": None},
    ],
    "field rounds: missing": [{"type": "conversation"}, {"type": "ref_qa", "reference": "r"}],
    "field rounds: List should have at least 1 item": [conversation()],
    "field rounds[0]: expected a tuple, found": [conversation("ab"), with_action() | {"rounds": [1]}],
    "field rounds[0][0]: expected 'ask' or 'ans'": [conversation(["user", "q"])],
    "field rounds[2][0]: expected 'ask' or 'ans'": [conversation(*ROUNDS, ["ans-api", {}])],
    "field rounds: expected at least one answer, found asks only": [
        conversation(["ask", "q"], ["ask", "r"]),
        {"type": "ref_qa", "reference": "r", "rounds": ROUNDS[:1]},
    ],
    "field rounds[1][1]: expected an object": [with_action() | {"rounds": [ROUNDS[0], ["ans-api", "a"]]}],
    "field rounds[1][1].actions[0].api_name: expected a string, found a number": [with_action(api_name=7)],
    "field rounds[1][1].actions[0].api_param: expected ": [with_action(api_param=each) for each in ([1], "{b", "[1]")],
    # messages
    "field messages: List should have at least 1 item": [{"messages": []}],
    "field messages[0]: expected an object, found null": [{"messages": [None]}],
    "field messages[1].role: expected one of system, ": [{"messages": [USER, {"role": "robot", "content": "a"}]}],
    "field messages[0].role: missing": [{"messages": [{"content": "a"}]}],
    "field messages[1].content: expected a text, found none": [{"messages": [USER, ANSWER | {"content": None}]}],
    f"field messages[0].content: {NO_TEXT}": [
        {"messages": [USER | {"content": content}, ANSWER]}
        for content in (
            [{"type": "video_url"}],
            [WORDS, {"type": "video_url", "text": "", "video_url": {"url": "u"}}],
            {"answer": 5},
            [NO],
        )
    ],
    "field images: 0 images, but 1 place for them": [
        {"messages": [USER | {"content": [each]}, ANSWER]}
        for each in ({"type": "image_url"}, {"type": "image", "text": ""})
    ],
    "field content: expected records without images": [
        {"messages": [USER | {"content": [WORDS, {"type": "image_url", "image_url": {"url": "u"}}]}, ANSWER]}
    ],
    "field messages[0].content.image: expected images beside the messages, or as parts of what they say": [
        {"messages": [said("user", WORDS | {"image": "a.png"}), ANSWER]}
    ],
    f"field messages[1].content: {NO_TEXT}": [{"messages": [USER, said("assistant", {"type": "refusal"})]}],
    "field messages: expected at least one of the assistant, found none that is trained": [
        {"messages": [USER], "tools": []},
        {"conversations": [sent("human", "q")]},
        {"conversations": ["q"]},
        {"prompt": [USER], "completion": [ANSWER | {"weight": 0}]},
    ],
    "field messages[0].tool_calls[0].function.arguments: expected an object or a JSON string of one": [
        {"messages": [ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}
    ],
    "field messages[1].reasoning_content: expected it of the assistant alone, not of user": [
        {"messages": [ANSWER, USER | {"reasoning_content": "t"}, ANSWER]}
    ],
    "field messages[1].tool_calls: expected it of the assistant alone, not of user": [
        {"messages": [ANSWER, USER | {"tool_calls": [{"function": CALL}]}, ANSWER]}
    ],
    "field messages[0].train: expected false, as only an assista": [{"messages": [USER | {"train": True}, ANSWER]}],
    "field messages[1].loss: expected true or false, found 'no'": [{"messages": [USER, ANSWER | {"loss": "no"}]}],
    "field messages[1].content.train: parts of one message cannot be trained apart": [
        {"messages": [USER, said("assistant", WORDS | {"train": False})]}
    ],
    "field tools: expected a list or a JSON string of one": [{"messages": [ANSWER], "tools": "[{"}],
    "field chat_template_kwargs: expected others than tools, which Pipetune gives": [
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"a": 1, "tools": []}}
    ],
    "field chat_template_kwargs: expected an object or a JSON string of one": [
        {"prompt": "q", "completion": "a", "chat_template_kwargs": "low"}
    ],
    "field conversations[0].from: expected one of system, ": [{"conversations": [sent("robot", "a")]}],
    "field conversations[0]: expected an object": [{"conversations": ["q", sent("gpt", "a")]}],
    "field conversations[0].role: missing": [{"conversations": [{"input": "q"}]}],
    "field conversations[0]: the function_call is not JSON": [
        {"conversations": [sent("function_call", value)]}
        for value in ("weather()", "3", '{"name": "f", "arguments": [1]}', "{}", "[" * 9999, '[{"name": 1}]')
    ],
    "field messages: parts of message 1: expected thinking, text, tool_use in this order, found tool_use, text": [
        {"messages": [USER, said("assistant", USE, WORDS)]}
    ],
    "field messages: parts of message 1: thinking: expected a text": [
        {"messages": [USER, said("assistant", {"type": "thinking"}, WORDS)]}
    ],
    "field messages: parts of message 2: expected tool_result, text in this order, found text, tool_result": [
        {"messages": [USER, said("assistant", USE), said("user", WORDS, GIVEN), ANSWER]}
    ],
    "fields messages and conversations and rounds: expected one dialogue, or columns that name it": [
        {"conversations": [USER, ANSWER], "messages": [USER, ANSWER], "rounds": ROUNDS}
    ],
    # other layouts
    "field paragraphs[0].qas: List should have at least 1 item": [{"paragraphs": [{"context": "c", "qas": []}]}],
    "field paragraphs[0].qas[0].answers[0]: expected a string, found an object": [
        {"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"answer": "a"}]}]}]}
    ],
    "field answers: expected at least one call, found none": [{"query": "q", "answers": "[]", "tools": []}],
    "field answers: expected a list of calls with name and arguments": [
        {"query": "q", "answers": answers, "tools": []} for answers in ("sunny", [{"city": "Wien"}])
    ],
    "field instruction: expected a question here or in input, found both empty": [{"instruction": "", "output": "o"}],
    "field prompt: expected a text of at least 1 character, found ''": [{"prompt": "", "completion": "a"}],
    "field input: expected a text of at least 1 character, found ''": [{"input": "", "completion": "a"}],
    "field question: expected a text of at least 1 character, found ''": [{"question": "", "answer": "a"}],
    "field instruct: expected a text of at least 1 character, found ''": [
        {"type": "instruct", "instruct": "", "output": "a"}
    ],
    "field completion: expected a text or a list of messages, found a number": [{"prompt": "q", "completion": 1.0}],
    "field completion: expected a text or a list of messages, found true or false": [
        {"prompt": "q", "completion": True}
    ],
    "field response: expected a text or a list of messages, found an object": [{"prompt": "q", "response": {}}],
    "field prompt: expected a text or a list of messages, found a number": [{"prompt": 2, "completion": "a"}],
    "field answer: expected a string, found a number": [{"question": "q", "answer": 4.2}],
    "field answer: expected a string, found true or false": [{"question": "q", "answer": True}],
    "field reasoning: expected the thoughts of the answer, found 'on'": [
        {"question": "q", "answer": "a", "reasoning": "on"}
    ],
    "field role: expected whole dialogues": [{"text": "t", "role": "prompter", "parent_id": None}],
    "a table written column by column; expected one object for each record": [
        {"instruction": ["i", "j"], "output": ["o", "p"]},
        {"prompt": {"0": "i", "1": "j"}, "completion": {"0": "o", "1": "p"}},
    ],
    "field system": [{"messages": [USER, ANSWER], "system": [{"image": "i"}]}],
    "field segments: expected a label with at least one": [{"segments": [{"text": "t", "label": False}]}],
    "field labels: expected 2, one for each of input_ids, found 1": [{"input_ids": [1, 2], "labels": [2]}],
    "field labels[0]: expected 1, as in input_ids, or -100, found 2": [{"input_ids": [1, 2], "labels": [2, -100]}],
    "field attention_mask[1]: expected 1": [{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}],
}


@pytest.mark.parametrize(("line", "raw"), [(line, raw) for line, raws in REFUSED.items() for raw in raws])
def test_what_is_wrong_is_named_with_its_field(line: str, raw: Any) -> None:
    found = refusal(raw)
    assert found.startswith(line)
    assert len(found) < 400


def test_a_line_names_the_field_that_a_forced_format_misses_and_as_columns_does() -> None:
    assert refusal({"text": "t"}, "alpaca") == "field instruction: missing"
    assert refusal({"text": "t"}, "pipetune").startswith("field type: expected one of")
    columns = {"question": "Frage", "answer": "Antwort"}
    assert refusal({"Frage": "q", "Antwort": ["a"]}, columns=columns).startswith("field Antwort: expected a string")


@pytest.mark.parametrize("field", ["messages", "tools", "conversations", "paragraphs", "instances", "input_ids"])
def test_a_million_wrong_entries_are_refused_at_the_first(field: str) -> None:
    """pydantic would keep a note of each of them."""
    raw = {"messages": [ANSWER]} if field == "tools" else {"instruction": "i"} if field == "instances" else {}
    assert refusal(raw | {field: [None] * 1_000_000}).startswith(f"field {field}[0]")


def test_nulls_that_a_table_put_into_calls_are_left_out_and_declared_ones_stay(tmp_path: Path) -> None:
    properties = {"city": {"type": "string"}, "unit": {"type": ["string", "null"], "default": None}, "other": None}
    tool: dict[str, Any] = {
        "name": "f",
        "parameters": {"type": "object", "properties": properties, "required": None},
    }
    arguments = {"city": "Lima", "unit": None, "other": None}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    record = parse_record({"messages": [USER, call], "tools": [tool]})
    del properties["other"], arguments["other"], tool["parameters"]["required"]
    assert record.model_dump() == chat(USER, call, tools=[{"type": "function", "function": tool}]).model_dump()

    calls = [{"function": {"name": "f", "arguments": each}} for each in ({"city": "Lima"}, {"days": 3})]
    records = [{"messages": [USER, {"role": "assistant", "tool_calls": [call]}]} for call in calls]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "structs.parquet")
    found = [parse(raw) for raw in read_file(tmp_path / "structs.parquet")]
    assert "null" in json.dumps(parquet.read_table(tmp_path / "structs.parquet").to_pylist())
    assert [each.records for each in found] == [[parse_record(record)] for record in records]


def test_columns_of_other_names_make_no_difference_to_a_record() -> None:
    assert convert({"q": "q", "a": "a"}, columns={"prompt": "q", "completion": "a"}).records == [instruct("q", "a")]
