"""Every published layout becomes the right record of Pipetune; what fits none is refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from data.errors import DataError
from data.records import layouts
from data.records.chat import Chat
from data.records.formats import FORMATS, convert
from data.records.record import Instruct, Pretrain, Record, RefQA, Segment, Segments, Tokenized
from tests.data.helpers import RECORDS

CALL = {"name": "weather", "arguments": {"city": "Wien"}}
TOOL = {"name": "weather", "parameters": {"type": "object"}}
FRAMED = {"type": "function", "function": TOOL}
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def instruct(ask: str, answer: str, more: str | None = None) -> Instruct:
    return Instruct(type="instruct", instruct=ask, input=more, output=answer)


def chat(*messages: dict[str, Any], tools: Any = None) -> Chat:
    return Chat.model_validate({"messages": list(messages), "tools": tools})


def ref_qa(reference: str, *texts: str) -> RefQA:
    rounds = [(("ask", "ans")[number % 2], text) for number, text in enumerate(texts)]
    return RefQA.model_validate({"type": "ref_qa", "reference": reference, "rounds": rounds})


def refusal(raw: Any, format_name: str | None = None, columns: dict[str, str] | None = None) -> str:
    with pytest.raises(DataError) as caught:
        convert(raw, format_name, columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CASES: dict[str, list[tuple[dict[str, Any], list[Record]]]] = {
    "pipetune": [({"type": "pretrain", "text": "t"}, [Pretrain(type="pretrain", text="t")])],
    "openai": [
        ({"messages": [USER, ANSWER]}, [chat(USER, ANSWER)]),
        ({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [chat(USER, ANSWER)]),
        ({"messages": [USER, ANSWER], "system": "s"}, [chat({"role": "system", "content": "s"}, USER, ANSWER)]),
        (
            {"messages": [USER, ANSWER | {"thinking": "t", "loss": True}, USER, ANSWER | {"training": 0}]},
            [chat(USER, ANSWER | {"reasoning_content": "t"}, USER, ANSWER | {"weight": 0})],
        ),
        ({"type": "chat", "messages": [USER, ANSWER], "prompt": "q"}, [chat(USER, ANSWER)]),
        (
            {
                "messages": [
                    {
                        "role": "developer",
                        "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind"}],
                    },
                    {"role": "user", "content": "q", "name": "Ada"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": CALL | {"arguments": '{"city": "Wien"}'}}
                        ],
                    },
                    {"role": "tool", "content": "rain", "tool_call_id": "1"},
                    {"role": "assistant", "content": "wet", "weight": 0},
                    ANSWER,
                ],
                "tools": [FRAMED],
                "parallel_tool_calls": False,
            },
            [
                chat(
                    {"role": "system", "content": "Be kind"},
                    {"role": "user", "content": "q", "name": "Ada"},
                    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": CALL}]},
                    {"role": "tool", "content": "rain", "tool_call_id": "1"},
                    {"role": "assistant", "content": "wet", "weight": 0},
                    ANSWER,
                    tools=[FRAMED],
                )
            ],
        ),
        (  # the older form of calls
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "function_call": CALL | {"arguments": '{"city": "Wien"}'}},
                    {"role": "function", "name": "weather", "content": "rain"},
                ],
                "functions": [TOOL],
            },
            [
                chat(
                    USER,
                    {"role": "assistant", "tool_calls": [{"function": CALL}]},
                    {"role": "tool", "name": "weather", "content": "rain"},
                    tools=[FRAMED],
                )
            ],
        ),
    ],
    "sharegpt": [
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s", "id": 1},
            [chat({"role": "system", "content": "s"}, USER, ANSWER)],
        ),
        ({"conversations": [USER, ANSWER], "tools": ""}, [chat(USER, ANSWER)]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "train": False}, ANSWER]},
            [chat(USER, ANSWER | {"weight": 0}, ANSWER)],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": {"rain": True}},
                    {"from": "function_call", "value": [CALL, CALL | {"arguments": "{}"}]},
                    {"from": "observation", "value": "[]"},
                    {"from": "gpt", "value": "a"},
                ],
                "tools": json.dumps([TOOL]),
            },
            [
                chat(
                    {"role": "system", "content": "s"},
                    USER,
                    {"role": "assistant", "tool_calls": [{"function": CALL}]},
                    {"role": "tool", "content": '{"rain": true}'},
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": CALL}, {"function": {"name": "weather", "arguments": {}}}],
                    },
                    {"role": "tool", "content": "[]"},
                    ANSWER,
                    tools=[FRAMED],
                )
            ],
        ),
    ],
    "squad": [
        (
            {
                "title": "t",
                "paragraphs": [
                    {
                        "context": "c",
                        "qas": [
                            {"question": "q", "answers": [{"text": "a", "answer_start": 1}, {"text": "other"}]},
                            {"question": "r", "answers": [], "is_impossible": True},
                        ],
                    },
                    {"context": "d", "qas": [{"question": "q", "answers": [{"text": "b"}]}]},
                ],
            },
            [ref_qa("c", "q", "a", "r", ""), ref_qa("d", "q", "b")],
        )
    ],
    "squad_paragraph": [
        (  # CMRC 2018
            {
                "context_id": "1",
                "context_text": "c",
                "qas": [{"query_id": "1", "query_text": "q", "answers": ["a", "b"]}],
            },
            [ref_qa("c", "q", "a")],
        )
    ],
    "squad_row": [
        (
            {"id": "1", "context": "c", "question": "q", "answers": {"text": ["a", "b"], "answer_start": [0, 1]}},
            [ref_qa("c", "q", "a")],
        ),
        ({"context": "c", "question": "q", "answers": [{"text": "a"}]}, [ref_qa("c", "q", "a")]),
    ],
    "self_instruct": [
        (
            {"id": "seed_task_1", "instruction": "i", "instances": [{"input": "x", "output": "a"}, {"output": "b"}]},
            [instruct("i", "a", "x"), instruct("i", "b")],
        )
    ],
    "alpaca": [
        ({"instruction": "i", "input": "", "output": "o", "text": "i o"}, [instruct("i", "o")]),
        ({"instruction": "i", "input": "x", "output": "o", "type": "maths"}, [instruct("i", "o", "x")]),
        ({"instruction": "", "input": "x", "output": "o"}, [instruct("x", "o")]),
        ({"instruction": "i", "output": "o", "history": [], "system": None}, [instruct("i", "o")]),
        ({"instruction": "i", "context": "x", "response": "o", "category": "qa"}, [instruct("i", "o", "x")]),  # Dolly
        (
            {"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [["q", "a"]]},
            [
                chat(
                    {"role": "system", "content": "s"},
                    USER,
                    ANSWER,
                    {"role": "user", "content": "i\n\nx"},
                    {"role": "assistant", "content": "o"},
                )
            ],
        ),
    ],
    "prompt_completion": [
        ({"prompt": "q", "completion": "a"}, [instruct("q", "a")]),
        ({"prompt": "q", "response": "a"}, [instruct("q", "a")]),
        ({"prompt": "q", "generation": "a"}, [instruct("q", "a")]),
        (
            {"prompt": "q", "completion": "a", "system": "s"},
            [chat({"role": "system", "content": "s"}, USER, ANSWER)],
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, [instruct("q", "a")]),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "tools": [FRAMED]},
            [chat(USER | {"weight": 0}, ANSWER | {"weight": 0}, USER | {"weight": 0}, ANSWER, tools=[FRAMED])],
        ),
    ],
    "question_answer": [
        ({"question": "q", "answer": "a"}, [instruct("q", "a")]),
        ({"query": "q", "response": "a"}, [instruct("q", "a")]),
        ({"question": "q", "answer": "a", "passage": "c"}, [ref_qa("c", "q", "a")]),
        (
            {"query": "q", "response": "a", "history": [["r", "b"]]},
            [chat({"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}, USER, ANSWER)],
        ),
        (
            {"question": "q", "answer": "a", "article": "c", "system": "s"},
            [chat({"role": "system", "content": "s"}, {"role": "user", "content": "Reference:\nc\n\nq"}, ANSWER)],
        ),
        (
            {"system_prompt": "s", "question": "q", "response": "a"},
            [chat({"role": "system", "content": "s"}, USER, ANSWER)],
        ),
    ],
    "segments": [
        (
            {"segments": [{"label": False, "text": "<s>q\n"}, {"label": True, "text": "a</s>"}]},
            [Segments(segments=[Segment(text="<s>q\n", label=False), Segment(text="a</s>", label=True)])],
        )
    ],
    "tokens": [
        ({"input_ids": [1, 5, 6], "labels": [-100, 5, 6]}, [Tokenized(input_ids=[1, 5, 6], labels=[-100, 5, 6])]),
        (
            {"input_ids": [1, 5], "attention_mask": [1, 1], "labels": None},
            [Tokenized(input_ids=[1, 5], attention_mask=[1, 1])],
        ),
    ],
    "text": [
        ({"text": "t", "meta": {"url": "u"}}, [Pretrain(type="pretrain", text="t")]),
        ({"text": "t", "messages": None, "type": None}, [Pretrain(type="pretrain", text="t")]),
    ],
}


def test_every_format_is_tested() -> None:
    assert set(CASES) == set(FORMATS)


@pytest.mark.parametrize(
    ("name", "raw", "expected"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_a_layout_is_recognised_and_converted(name: str, raw: dict[str, Any], expected: list[Record]) -> None:
    assert convert(raw).records == expected
    assert convert(raw, name).records == expected


@pytest.mark.parametrize("name", RECORDS)
def test_pipetunes_own_types_are_recognised(name: str) -> None:
    (record,), unused = convert(RECORDS[name])
    assert not unused
    assert record.type == RECORDS[name]["type"]


def test_format_decides_where_fields_of_several_are_there() -> None:
    both: dict[str, Any] = {"question": "q", "answer": "b", "context": "c", "answers": ["b"]}
    assert convert(both).records == [ref_qa("c", "q", "b")]
    assert convert(both | {"answers": []}, "question_answer").records == [ref_qa("c", "q", "b")]
    assert refusal(both | {"answer": "other"}).startswith("field answer: the record's format has no place for it")


def test_a_record_of_no_layout_is_refused_with_its_fields_and_the_formats() -> None:
    line = refusal({"id": 1, "chosen": "a", "rejected": "b"})
    assert line.startswith("no known format has the fields 'id', 'chosen', 'rejected'; expected columns that ")
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
            "field conversations[0].role: expected one of system, ",
        ),
        ({"conversations": [{"from": "gpt"}]}, "field conversations[0].content: missing"),
        (
            {"conversations": [{"from": "gpt", "value": 5}]},
            "field conversations[0].content: expected a string, found a n",
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
        ({"question": "q", "answer": 42}, "field answer: expected a string, found a number"),
        ({"text": ""}, "field text: String should have at least 1 character"),
        ({"text": float("nan")}, "field text: expected a string, found a number"),
        ({"instruction": "i", "output": None}, "field output: expected a value, found null"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "field messages[1].content: missing"),
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


QA = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"prompt": "q", "completion": "a", "label": False}, "label: preference data"),
        ({"prompt": "q", "completion": "a", "label": True}, "label: preference data"),
        ({"messages": [USER, ANSWER], "kto_tag": False}, "kto_tag: preference data"),
        ({"messages": [USER, ANSWER], "chosen": [ANSWER], "rejected": [ANSWER]}, "chosen: preference data"),
        ({"instruction": "i", "output": "o", "rejected_response": "n"}, "rejected_response: preference data"),
        *(
            ({"messages": [USER, ANSWER], name: ["a.png"]}, f"{name}: expected records without it")
            for name in ("images", "image", "audio", "audios", "video", "videos")
        ),
        ({"messages": [USER, ANSWER | {"images": ["a.png"]}]}, "messages[1].images: expected records without it"),
        ({"text": "t", "label": 1}, "label: the record's format has no place for it"),
        ({"messages": [USER, ANSWER], "weight": 0.5}, "weight: the record's format has no place for it"),
        ({"messages": [USER, ANSWER], "history": [["r", "b"]]}, "history: the record's format has no place for it"),
        (QA | {"reasoning": "because"}, "reasoning: the record's format has no place for it"),
        (QA | {"context": "c", "passage": "d"}, "passage: the record's format has no place for it"),
        (QA | {"train": False}, "train: the record's format has no place for it"),
        ({"type": "instruct", "instruct": "i", "output": "o", "system": "s"}, "system: the record's format has no "),
        ({"type": "pretrain", "text": "t", "images": ["a.png"]}, "images: expected records without it"),
    ],
)
def test_a_field_that_matters_is_used_or_refused_by_its_name(raw: dict[str, Any], name: str) -> None:
    assert refusal(raw).startswith(f"field {name}")


@pytest.mark.parametrize("value", [None, "", [], {}])
@pytest.mark.parametrize("name", ["images", "history", "rejected", "context"])
def test_an_empty_field_is_no_field(name: str, value: Any) -> None:
    assert convert({"messages": [USER, ANSWER], name: value}) == ([chat(USER, ANSWER)], [])


def test_what_the_record_holds_already_may_stand_there_again() -> None:
    """As `prompt` does beside the messages of UltraChat."""
    records, unused = convert({"messages": [USER | {"content": "What is it?"}, ANSWER], "prompt": "What is it?"})
    assert len(records) == 1
    assert unused == ["prompt"]


def test_other_fields_are_named_but_for_those_that_nobody_would_ask_about() -> None:
    raw = QA | {"id": 7, "source": "web", "difficulty": "hard", "n_hops": 3, "weight": 1, "url": "u"}
    assert convert(raw) == ([instruct("q", "a")], ["difficulty", "n_hops", "weight"])


AGENT = {"who": "agent", "says": "a"}
SPOKEN = [{"speaker": "setup", "text": "s"}, {"speaker": "user", "text": "q"}, {"speaker": "assistant", "text": "a"}]
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
