"""Every published layout becomes the right record of Pipetune; what fits none is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedTokenizerBase

from data.records import layouts
from data.records.chat import Chat
from data.records.formats import FORMATS, convert
from data.records.record import Record, RefQA
from data.tokenized.tokenize import encode_many
from tests.data.format_cases import ANSWER, CALL, CASES, TOOL, USER, chat, instruct, ref_qa, refusal
from tests.data.helpers import RECORDS, REWRITING

# Anthropic's parts of messages.
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
WORDS = {"type": "text", "text": "a"}
USE = {"type": "tool_use", "id": "1", "name": CALL["name"], "input": CALL["arguments"]}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"text": "18"}]}
NO = {"type": "refusal", "refusal": "I can't."}
THINKING = ANSWER | {"reasoning_content": "hm"}
CALLING = {"role": "assistant", "tool_calls": [{"id": "1", "function": CALL}]}
RETURNED = {"role": "tool", "content": "18", "tool_call_id": "1"}


def said(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def test_every_format_is_tested() -> None:
    assert set(CASES) == set(FORMATS)


@pytest.mark.parametrize(
    ("name", "raw", "expected"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_a_layout_is_recognised_and_converted(name: str, raw: dict[str, Any], expected: list[Record]) -> None:
    assert convert(raw).records == expected
    assert convert(raw, name).records == expected


@pytest.mark.parametrize(("raw", "records"), [case for cases in CASES.values() for case in cases])
def test_an_object_of_any_layout_can_be_encoded(
    raw: dict[str, Any], records: list[Record], tokenizer: PreTrainedTokenizerBase
) -> None:
    (given,) = encode_many([raw], tokenizer, REWRITING)
    if len(records) == 1:
        (expected,) = encode_many(records, tokenizer, REWRITING)
        assert str(given) == str(expected)
    else:
        assert str(given) == f"expected an object that makes one record, found one that makes {len(records)}"


@pytest.mark.parametrize("name", RECORDS)
def test_pipetunes_own_types_are_recognised(name: str) -> None:
    (record,), unused, _ = convert(RECORDS[name])
    assert not unused
    assert record.type == RECORDS[name]["type"]


def test_format_decides_where_fields_of_several_are_there() -> None:
    both: dict[str, Any] = {"question": "q", "answer": "b", "context": "c", "answers": ["b"]}
    assert convert(both).records == [ref_qa("c", "q", "b")]
    assert convert(both | {"answers": []}, "question_answer").records == [ref_qa("c", "q", "b")]
    assert refusal(both | {"answer": "other"}).startswith("field answer: the record's format has no place for it")


def test_a_record_of_no_layout_is_refused_with_its_fields_and_the_formats() -> None:
    line = refusal({"id": 1, "one": "a", "other": "b"})
    assert line.startswith("no known format has the fields 'id', 'one', 'other'; expected columns that ")
    for name, known in FORMATS.items():
        assert f"{name} ({known})" in line
    assert "alpaca (instruction, output|response)" in line
    assert "no known format has the fields (none); " in refusal({})
    many = refusal({"x" * 1000 + str(number): 0 for number in range(1000)})
    assert "..." in many
    assert len(many) < 2000


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (None, "expected an object, found null"),
        ([], "expected an object, found a list"),
        ({"type": "alpaca"}, "field type: expected one of pretrain, instruct, conversation, conver_has_api, ref_qa, "),
        ({"type": "x" * 10_000}, "field type: expected one of "),
        ({"messages": "q"}, "field messages: expected a list, found a string"),
        ({"messages": []}, "field messages: List should have at least 1 item"),
        ({"messages": [None]}, "field messages[0]: expected an object, found null"),
        ({"messages": [USER, {"role": "robot", "content": "a"}]}, "field messages[1].role: expected one of system, "),
        ({"messages": [{"content": "a"}]}, "field messages[0].role: missing"),
        ({"messages": [USER | {"content": 3}]}, "field messages[0].content: expected a string, found a number"),
        (
            {"messages": [USER | {"content": [{"type": "image_url"}]}]},
            "field messages[0].content: expected a text or a ",
        ),
        ({"messages": [USER]}, "field messages: expected at least one of the assistant, found none that bears loss"),
        (
            {"messages": [ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "field messages[0].tool_calls[0].function.arguments: expected an object or a JSON string of one",
        ),
        ({"messages": [ANSWER | {"tool_calls": 1}]}, "field messages[0].tool_calls: expected a list, found a number"),
        ({"messages": [ANSWER], "tools": "[{"}, "field tools: expected a list or a JSON string of one"),
        ({"messages": [ANSWER], "tools": {"name": "f"}}, "field tools: expected a list, found an object"),
        ({"messages": [ANSWER], "tools": [1]}, "field tools[0]: expected a dictionary, found a number"),
        (
            {"conversations": [{"from": "robot", "value": "a"}]},
            "field conversations[0].from: expected one of system, ",
        ),
        ({"conversations": [{"from": "gpt"}]}, "field conversations[0].content: missing"),
        (
            {"conversations": [{"from": "gpt", "value": 5}]},
            "field conversations[0].value: expected a string, found a n",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}]},
            "field messages: expected at least one of the assistant",
        ),
        *(
            (
                {"conversations": [{"from": "function_call", "value": value}]},
                "field conversations[0]: the function_call",
            )
            for value in ("weather()", "3", '{"name": "f", "arguments": [1]}', "{}", "[" * 9999, '[{"name": 1}]')
        ),
        ({"paragraphs": [{"context": "c", "qas": []}]}, "field paragraphs[0].qas: List should have at least 1 item"),
        (
            {"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"answer": "a"}]}]}]},
            "field paragraphs[0].qas[0].answers[0].text: missing",
        ),
        (
            {"context": "c", "question": "q", "answers": {"text": [1]}},
            "field answers[0]: expected an object, found",
        ),
        ({"instruction": "i", "instances": [{"input": "x"}]}, "field instances[0].output: missing"),
        ({"instruction": "i", "output": ["o"]}, "field output: expected a string, found a list"),
        (
            {"instruction": "", "output": "o"},
            "field instruction: expected a question here or in input, found both empty",
        ),
        ({"instruction": "i", "output": "o", "history": [["q"]]}, "field history[0][1]: missing"),
        ({"prompt": 3, "completion": "a"}, "field prompt: expected a list, found a number"),
        ({"prompt": "", "completion": "a"}, "field instruct: String should have at least 1 character"),
        ({"question": "q", "answer": 4.2}, "field answer: expected a string, found a number"),
        ({"question": "q", "answer": True}, "field answer: expected a string, found true or false"),
        *(
            (raw, "a table written column by column; expected one object for each record")
            for raw in (
                {"instruction": ["i", "j"], "output": ["o", "p"]},
                {"instruction": {"0": "i"}, "output": {"0": "o"}},
                {"prompt": {"0": "i", "1": "j"}, "completion": {"0": "o", "1": "p"}},
                {"question": ["i"], "answer": ["o"], "id": ["1"]},
            )
        ),
        ({"messages": [USER], "tools": []}, "field messages: expected at least one of the assistant"),
        ({"instruction": ["i"], "output": "o"}, "field instruction: expected a string, found a list"),
        ({"conversations": ["q"]}, "field messages: expected at least one of the assistant"),
        ({"conversations": ["q", {"from": "gpt", "value": "a"}]}, "field conversations[0]: expected an object"),
        ({"conversations": [{"input": "q"}]}, "field conversations[0].role: missing"),
        ({"messages": [USER, ANSWER], "system": [{"image": "i"}]}, "field system"),
        *(
            (
                {"messages": [USER, ANSWER], "chat_template_kwargs": given},
                f"field chat_template_kwargs: expected {line}",
            )
            for given, line in (
                ({"a": 1, "tools": []}, "others than tools, which Pipetune gives"),
                ({"add_generation_prompt": True}, "others than add_generation_prompt, which Pipetune gives"),
                ([1], "a dictionary, found a list"),
                ("low", "an object or a JSON string of one"),
            )
        ),
        (
            {"text": "t", "chat_template_kwargs": {"a": 1}},
            "field chat_template_kwargs: the record's format has no place",
        ),
        ({"messages": [USER, ANSWER | {"refusal": "no"}]}, "field messages[1].refusal: the record's format has no "),
        (
            {"messages": [said("user", NO), ANSWER]},
            "field messages[0].content: expected a text or a list of parts with a text each, found one of type 'refus",
        ),
        (
            {"messages": [USER, said("assistant", {"type": "refusal"})]},
            "field messages[1].content: expected a text or a list of parts with a text each",
        ),
        (
            {"conversations": [USER, ANSWER], "messages": [USER, ANSWER], "rounds": [["ask", "q"]]},
            "fields messages and conversations and rounds: expected one dialogue, or columns that name it",
        ),
        (
            {"messages": [USER, said("assistant", USE, WORDS)]},
            "field messages: parts of message 1: expected thinking, text, tool_use in this order, found tool_use, text",
        ),
        (
            {"messages": [USER, said("assistant", {"type": "thinking"}, WORDS)]},
            "field messages: parts of message 1: thinking: expected a text",
        ),
        (
            {"messages": [USER, said("assistant", USE), said("user", WORDS, RESULT), ANSWER]},
            "field messages: parts of message 2: expected tool_result, text in this order, found text, tool_result",
        ),
        (
            {"messages": [USER, said("assistant", USE), said("user", RESULT) | {"mask": 1}, ANSWER]},
            "field messages[2].mask: the record's format has no place for it",
        ),
        ({"messages": [USER, ANSWER, USER], "answer": "b"}, "field answer: the record's format has no place for it"),
        ({"query": "q", "answers": "[]", "tools": []}, "field answers: expected at least one call, found none"),
        ({"query": "q", "answers": "sunny", "tools": []}, "field answers: expected a list of calls with name and arg"),
        ({"query": "q", "answers": [{"city": "Wien"}], "tools": []}, "field answers: expected a list of calls"),
        ({"text": ""}, "field text: String should have at least 1 character"),
        ({"text": float("nan")}, "field text: expected a string, found a number"),
        ({"instruction": "i", "output": None}, "field output: expected a value, found null"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "field messages[1].content: expected a text, f"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "field conversations[0].value: expected a text, found n"),
        ({"messages": [USER | {"train": True}, ANSWER]}, "field messages[0].train: expected false, as only an assista"),
        ({"messages": [USER, ANSWER | {"loss": "no"}]}, "field messages[1].loss: expected true or false, found 'no'"),
        (
            {"messages": [USER, ANSWER | {"content": [{"type": "text", "text": "a", "train": False}]}]},
            "field messages[1].content.train: one part cannot bear loss and another not",
        ),
        ({"segments": [{"text": "t", "label": False}]}, "field segments: expected a label with at least one"),
        ({"segments": [{"text": "t"}]}, "field segments[0].label: missing"),
        ({"input_ids": [1, 2], "labels": [2]}, "field labels: expected 2, one for each of input_ids, found 1"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "field labels[0]: expected 1, as in input_ids, or -100, found 2"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "field attention_mask[1]: expected 1"),
        ({"input_ids": [1, -2]}, "field input_ids[1]: expected "),
    ],
)
def test_what_is_wrong_is_named_with_its_field(raw: Any, reason: str) -> None:
    line = refusal(raw)
    assert line.startswith(reason)
    assert len(line) < 400


def test_a_forced_format_names_the_field_that_it_misses() -> None:
    assert refusal({"text": "t"}, "alpaca") == "field instruction: missing"
    assert refusal({"instruction": "i"}, "alpaca") == "field output: missing"
    assert refusal({"text": "t"}, "pipetune").startswith("field type: missing")


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (Chat, "messages"),
        (Chat, "tools"),
        (layouts.ShareGPT, "conversations"),
        (layouts.SquadArticle, "paragraphs"),
        (layouts.SelfInstruct, "instances"),
        (RefQA, "rounds"),
    ],
)
def test_a_million_wrong_entries_are_one_complaint(model: type[BaseModel], field: str) -> None:
    """pydantic would keep a note of each of them."""
    fields: dict[str, Any] = {"type": "ref_qa", "reference": "r", "instruction": "i", "messages": [ANSWER]}
    entries: list[Any] = [["ask", 1], ["ans", 2], ["ans", 3]] if field == "rounds" else [1] * 1_000_000
    if model is Chat:
        fields["type"] = "chat"
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields | {field: entries})
    assert caught.value.error_count() == 1


def test_a_complaint_names_the_field_as_columns_does() -> None:
    columns = {"question": "Frage", "answer": "Antwort"}
    assert refusal({"Frage": "q", "Antwort": ["a"]}, columns=columns).startswith("field Antwort: expected a string")


SYSTEM = {"role": "system", "content": "Be kind"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"conversations": ["q", "a"]}, chat(USER, ANSWER)),
        ({"conversations": '["q", "a", "q", "a"]'}, chat(USER, ANSWER, USER, ANSWER)),
        ({"conversation": [{"input": "q", "output": "a"}] * 2}, chat(USER, ANSWER, USER, ANSWER)),
        ({"messages": [USER, ANSWER], "system": [{"text": "Be "}, {"text": "kind"}]}, chat(SYSTEM, USER, ANSWER)),
        ({"instruction": "q", "output": "a", "system": [{"text": "Be kind"}]}, chat(SYSTEM, USER, ANSWER)),
        *(
            ({"messages": [USER, ANSWER], "chat_template_kwargs": given}, chat(USER, ANSWER))
            for given in ({}, {"thinking": None}, "", "{}")
        ),
        *(
            (raw | {"chat_template_kwargs": given}, chat(USER, ANSWER, chat_template_kwargs={"thinking": False}))
            for given in ({"thinking": False, "budget": None}, '{"thinking": false}')
            for raw in (
                {"conversations": [USER, ANSWER]},
                {"prompt": "q", "completion": "a"},
                {"question": "q", "answer": "a"},
            )
        ),
        ({"messages": [USER, said("assistant", WORDS, NO)]}, chat(USER, ANSWER | {"content": "aI can't."})),
        ({"messages": [USER, {"role": "assistant", "content": None, "refusal": "a"}]}, chat(USER, ANSWER)),
        ({"instruction": "q", "output": 2}, instruct("q", "2")),
        ({"question": "q", "answer": 0}, instruct("q", "0")),
        ({"prompt": "q", "completion": -7}, instruct("q", "-7")),
        ({"messages": [USER, said("assistant", THOUGHT, WORDS)]}, chat(USER, THINKING)),
        ({"conversations": [USER, said("assistant", USE)]}, chat(USER, CALLING)),
        (
            {"messages": [USER, said("assistant", WORDS, USE), said("user", RESULT), ANSWER], "tools": [TOOL]},
            chat(USER, CALLING | {"content": "a"}, RETURNED, ANSWER, tools=[TOOL]),
        ),
        (
            {"messages": [USER, said("assistant", USE) | {"weight": 0}, said("user", RESULT, WORDS), ANSWER]},
            chat(USER, CALLING | {"weight": 0}, RETURNED, USER | {"content": "a"}, ANSWER),
        ),
    ],
)
def test_what_can_mean_one_thing_alone_is_read(raw: dict[str, Any], expected: Record) -> None:
    assert convert(raw).records == [expected]


@pytest.mark.parametrize(
    ("raw", "unused"),
    [
        ({"messages": [USER, ANSWER], "answer": "b", "problem": "p"}, ["problem", "answer"]),
        ({"conversations": [USER, ANSWER], "output": "b"}, ["output"]),
        ({"messages": [USER, ANSWER], "reference": "r", "completion": "c"}, ["reference", "completion"]),
    ],
)
def test_the_answer_in_other_words_beside_a_dialogue_is_named_as_unused(raw: dict[str, Any], unused: list[str]) -> None:
    assert convert(raw) == ([chat(USER, ANSWER)], unused, [])


def test_a_result_that_is_an_error_is_named_as_unused() -> None:
    turns = [USER, said("assistant", USE), said("user", RESULT | {"is_error": True}), ANSWER]
    assert convert({"messages": turns}) == ([chat(USER, CALLING, RETURNED, ANSWER)], ["messages.is_error"], [])
