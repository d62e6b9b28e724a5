"""Every published layout becomes the right record of Pipetune; what fits none is refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from data.chats.chat import Chat
from data.errors import DataError
from data.files import layouts
from data.files.formats import FORMATS, convert
from data.records import Instruct, Pretrain, Record, RefQA
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


def refusal(raw: Any, format_name: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        convert(raw, format_name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CASES: dict[str, list[tuple[dict[str, Any], list[Record]]]] = {
    "pipetune": [({"type": "pretrain", "text": "t"}, [Pretrain(type="pretrain", text="t")])],
    "openai": [
        ({"messages": [USER, ANSWER]}, [chat(USER, ANSWER)]),
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
        ({"prompt": [USER], "completion": [ANSWER]}, [instruct("q", "a")]),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "tools": [FRAMED]},
            [chat(USER | {"weight": 0}, ANSWER | {"weight": 0}, USER | {"weight": 0}, ANSWER, tools=[FRAMED])],
        ),
    ],
    "question_answer": [
        ({"question": "q", "answer": "a"}, [instruct("q", "a")]),
        ({"query": "q", "response": "a"}, [instruct("q", "a")]),
        (
            {"system_prompt": "s", "question": "q", "response": "a"},
            [chat({"role": "system", "content": "s"}, USER, ANSWER)],
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
    assert convert(raw) == expected
    assert convert(raw, name) == expected


@pytest.mark.parametrize("name", RECORDS)
def test_pipetunes_own_types_are_recognised(name: str) -> None:
    (record,) = convert(RECORDS[name])
    assert record.type == RECORDS[name]["type"]


def test_format_decides_where_fields_of_several_are_there() -> None:
    raw = {"instruction": "i", "output": "o", "text": "t", "prompt": "p", "completion": "c"}
    assert convert(raw) == [instruct("i", "o")]
    assert convert(raw, "text") == [Pretrain(type="pretrain", text="t")]
    assert convert(raw, "prompt_completion") == [instruct("p", "c")]


def test_a_record_of_no_layout_is_refused_with_its_fields_and_the_formats() -> None:
    line = refusal({"id": 1, "chosen": "a", "rejected": "b"})
    assert line.startswith("no known format has the fields 'id', 'chosen', 'rejected'; expected those of one of: ")
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
        ({"messages": [USER, {"role": "bot", "content": "a"}]}, "field messages[1].role: expected 'system', 'user', "),
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
            {"conversations": [{"from": "bot", "value": "a"}]},
            "field conversations[0].from: expected one of human, user",
        ),
        ({"conversations": [{"from": "gpt"}]}, "field conversations[0].value: missing"),
        (
            {"conversations": [{"from": "gpt", "value": 5}]},
            "field conversations[0].value: expected a string, found a n",
        ),
        ({"conversations": [{"from": "human", "value": "q"}]}, "field conversations: expected at least one of gpt"),
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
            "field answers[0].text: expected a string, found",
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
