"""Objects of every published layout, and the records that each becomes; short names for building both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.errors import DataError
from data.records.chat import Chat
from data.records.formats import convert
from data.records.record import Instruct, Pretrain, Record, RefQA, Segments, Tokenized

JSON = dict[str, Any]

CALL = {"name": "weather", "arguments": {"city": "Wien"}}
CALL_AS_TEXT = CALL | {"arguments": '{"city": "Wien"}'}
TOOL = {"name": "weather", "parameters": {"type": "object"}}
FRAMED = {"type": "function", "function": TOOL}
SYSTEM, USER, ANSWER = ({"role": r, "content": c} for r, c in (("system", "s"), ("user", "q"), ("assistant", "a")))
CALLING = {"role": "assistant", "tool_calls": [{"function": CALL}]}
CALLING_TWICE = {"role": "assistant", "tool_calls": [{"function": CALL}] * 2}
RESULT = {"role": "tool", "content": "rain"}


def sent(by: str, value: Any) -> JSON:
    """A message as ShareGPT writes it."""
    return {"from": by, "value": value}


def instruct(ask: str, answer: str, more: str | None = None) -> Instruct:
    return Instruct(type="instruct", instruct=ask, input=more, output=answer)


def chat(*messages: JSON, **more: Any) -> Chat:
    return Chat.model_validate({"messages": list(messages), **more})


def ref_qa(reference: str, *texts: str) -> RefQA:
    rounds = [(("ask", "ans")[number % 2], text) for number, text in enumerate(texts)]
    return RefQA.model_validate({"type": "ref_qa", "reference": reference, "rounds": rounds})


def refusal(raw: Any, format_name: str | None = None, columns: dict[str, str] | None = None) -> str:
    """The line with which an object is refused."""
    with pytest.raises(DataError) as caught:
        convert(raw, format_name, columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# By format: an object and its records.
def case(raw: JSON, *records: Record) -> tuple[JSON, list[Record]]:
    return raw, list(records)


CASES: dict[str, list[tuple[JSON, list[Record]]]] = {
    "pipetune": [({"type": "pretrain", "text": "t"}, [Pretrain(type="pretrain", text="t")])],
    "openai": [
        ({"messages": [USER, ANSWER]}, [chat(USER, ANSWER)]),
        ({"messages": [sent("human", "q"), sent("gpt", "a")]}, [chat(USER, ANSWER)]),
        ({"messages": [USER, ANSWER], "system": "s"}, [chat(SYSTEM, USER, ANSWER)]),
        (
            {"messages": [USER, ANSWER | {"thinking": "t", "loss": True}, USER, ANSWER | {"training": 0}]},
            [chat(USER, ANSWER | {"reasoning_content": "t"}, USER, ANSWER | {"weight": 0})],
        ),
        ({"type": "chat", "messages": [USER, ANSWER], "prompt": "q"}, [chat(USER, ANSWER)]),
        (
            {
                "messages": [
                    {"role": "developer", "content": [{"type": "text", "text": "s"}, {"type": "text", "text": ""}]},
                    USER | {"name": "Ada"},
                    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": CALL_AS_TEXT}]},
                    RESULT | {"tool_call_id": "1"},
                    ANSWER | {"weight": 0},
                    ANSWER,
                ],
                "tools": [FRAMED],
                "parallel_tool_calls": False,
            },
            [
                chat(
                    SYSTEM,
                    USER | {"name": "Ada"},
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": CALL}]},
                    RESULT | {"tool_call_id": "1"},
                    ANSWER | {"weight": 0},
                    ANSWER,
                    tools=[FRAMED],
                )
            ],
        ),
        (  # the older form of calls
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "function_call": CALL_AS_TEXT},
                    {"role": "function", "name": "weather", "content": "rain"},
                ],
                "functions": [TOOL],
            },
            [chat(USER, CALLING, RESULT | {"name": "weather"}, tools=[FRAMED])],
        ),
    ],
    "function_calls": [
        (
            {"query": "q", "answers": json.dumps([CALL]), "tools": json.dumps([TOOL]), "id": 1},
            [chat(USER, CALLING, tools=[FRAMED])],
        ),
        ({"query": "q", "answers": [CALL, CALL], "tools": [FRAMED]}, [chat(USER, CALLING_TWICE, tools=[FRAMED])]),
    ],
    "sharegpt": [
        (
            {"conversations": [sent("human", "q"), sent("gpt", "a")], "system": "s", "id": 1},
            [chat(SYSTEM, USER, ANSWER)],
        ),
        ({"conversations": [USER, ANSWER], "tools": ""}, [chat(USER, ANSWER)]),
        (
            {"conversations": [sent("human", "q"), sent("gpt", "a") | {"train": False}, ANSWER]},
            [chat(USER, ANSWER | {"weight": 0}, ANSWER)],
        ),
        (
            {
                "conversations": [
                    sent("system", "s"),
                    sent("human", "q"),
                    sent("function_call", json.dumps(CALL)),
                    sent("observation", {"rain": True}),
                    sent("tool_call", [CALL, CALL_AS_TEXT]),
                    sent("observation", "[]"),
                    sent("gpt", "a"),
                ],
                "tools": json.dumps([TOOL]),
            },
            [
                chat(
                    SYSTEM,
                    USER,
                    CALLING,
                    RESULT | {"content": '{"rain": true}'},
                    CALLING_TWICE,
                    RESULT | {"content": "[]"},
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
            {"context_id": "1", "context_text": "c", "qas": [{"query_text": "q", "answers": ["a", "b"]}]},
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
        ({"instruction": "", "input": "x", "output": 2}, [instruct("x", "2")]),
        ({"instruction": "i", "output": "o", "history": [], "system": None}, [instruct("i", "o")]),
        ({"instruction": "i", "context": "x", "response": "o", "category": "qa"}, [instruct("i", "o", "x")]),  # Dolly
        (
            {"instruction": "q", "input": "x", "output": "a", "system": "s", "history": [["q", "a"]]},
            [chat(SYSTEM, USER, ANSWER, USER | {"content": "q\n\nx"}, ANSWER)],
        ),
        ({"instruction": "q", "output": "a", "reasoning": "t"}, [chat(USER, ANSWER | {"reasoning_content": "t"})]),
    ],
    "prompt_completion": [
        *[
            case({"prompt": "q", answer: "a"}, instruct("q", "a"))
            for answer in ("completion", "response", "generation")
        ],
        *[case({"input": "q", answer: -7}, instruct("q", "-7")) for answer in ("output", "target", "content")],
        ({"prompt": "q", "completion": "a", "system": "s"}, [chat(SYSTEM, USER, ANSWER)]),
        ({"prompt": [USER], "completion": [ANSWER]}, [instruct("q", "a")]),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "tools": [FRAMED]},
            [chat(USER | {"weight": 0}, ANSWER | {"weight": 0}, USER | {"weight": 0}, ANSWER, tools=[FRAMED])],
        ),
        ({"input": [USER], "target": "a", "thinking": "t"}, [chat(USER, ANSWER | {"reasoning_content": "t"})]),
    ],
    "question_answer": [
        ({"question": "q", "answer": 0}, [instruct("q", "0")]),
        ({"query": "q", "response": "a"}, [instruct("q", "a")]),
        ({"question": "q", "answer": "a", "passage": "c"}, [ref_qa("c", "q", "a")]),
        ({"query": "q", "response": "a", "history": [["q", "a"]]}, [chat(USER, ANSWER, USER, ANSWER)]),
        (
            {"question": "q", "answer": "a", "article": "c", "system": "s"},
            [chat(SYSTEM, USER | {"content": "Reference:\nc\n\nq"}, ANSWER)],
        ),
        (
            {"system_prompt": "s", "question": "q", "cot": "t", "response": "a"},
            [chat(SYSTEM, USER, ANSWER | {"reasoning_content": "t"})],
        ),
    ],
    "segments": [
        (
            {"segments": [{"label": False, "text": "<s>q\n"}, {"label": True, "text": "a</s>"}]},
            [Segments.model_validate({"segments": [{"text": "<s>q\n", "label": 0}, {"text": "a</s>", "label": 1}]})],
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
