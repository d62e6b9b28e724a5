"""Objects of every published layout, and the records that each becomes; short names for building both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.errors import DataError
from data.records.chat import Chat
from data.records.formats import convert
from data.records.record import Instruct, Pretrain, Record, RefQA, Segment, Segments, Tokenized

CALL = {"name": "weather", "arguments": {"city": "Wien"}}
TOOL = {"name": "weather", "parameters": {"type": "object"}}
FRAMED = {"type": "function", "function": TOOL}
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def instruct(ask: str, answer: str, more: str | None = None) -> Instruct:
    return Instruct(type="instruct", instruct=ask, input=more, output=answer)


def chat(*messages: dict[str, Any], **more: Any) -> Chat:
    return Chat.model_validate({"messages": list(messages), **more})


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
    "function_calls": [
        (
            {"query": "q", "answers": json.dumps([CALL]), "tools": json.dumps([TOOL]), "id": 1},
            [chat(USER, {"role": "assistant", "tool_calls": [{"function": CALL}]}, tools=[FRAMED])],
        ),
        (
            {"query": "q", "answers": [CALL, CALL], "tools": [FRAMED]},
            [chat(USER, {"role": "assistant", "tool_calls": [{"function": CALL}] * 2}, tools=[FRAMED])],
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
