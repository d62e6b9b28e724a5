"""Inside a message, too, nothing is dropped in silence: calls, thoughts, switches, parts and other fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.records.formats import convert
from tests.data.format_cases import ANSWER, CALL, USER, chat, instruct, refusal

CALLING = {"role": "assistant", "tool_calls": [{"function": CALL}]}
RESULT = {"role": "tool", "content": "rain"}


@pytest.mark.parametrize("role", ["function_call", "tool_call"])
@pytest.mark.parametrize("names", [("role", "content"), ("from", "value")])
def test_what_such_a_sender_says_is_a_call(role: str, names: tuple[str, str]) -> None:
    said = dict(zip(names, (role, json.dumps(CALL)), strict=True))
    assert convert({"messages": [USER, said, RESULT, ANSWER]}).records == [chat(USER, CALLING, RESULT, ANSWER)]


def test_null_is_as_good_as_absent() -> None:
    nothing = dict.fromkeys(("weight", "tool_calls", "name", "reasoning_content", "train"))
    assert convert({"messages": [USER | nothing, ANSWER | nothing]}).records == [chat(USER, ANSWER)]


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER | {"reasoning_content": "t"},
        ANSWER | {"thinking": "t"},
        ANSWER | {"tool_calls": [{"function": CALL}]},
        ANSWER | {"name": "n"},
    ],
)
def test_a_completion_of_one_message_keeps_all_that_is_in_it(answer: dict[str, Any]) -> None:
    expected = chat(USER | {"weight": 0}, answer)
    assert convert({"prompt": [USER], "completion": [answer]}).records == [expected]
    assert convert({"prompt": "q", "completion": [answer]}).records == [expected]


def test_a_completion_without_loss_is_refused() -> None:
    line = refusal({"prompt": [USER], "completion": [ANSWER | {"weight": 0}]})
    assert line == "field messages: expected at least one of the assistant, found none that bears loss"
    assert convert({"prompt": [USER], "completion": [ANSWER]}).records == [instruct("q", "a")]


@pytest.mark.parametrize("columns", [{}, {"messages": "messages"}])
def test_fields_of_messages_that_are_not_used_are_named_once_a_record(columns: dict[str, str]) -> None:
    odd = ANSWER | {"thoughts": "t", "id": 7}
    parts = [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]
    raw = {"messages": [USER | {"content": parts}, odd, USER, odd], "difficulty": 1}
    records, unused, _ = convert(raw, columns=columns)
    assert records == [chat(USER, ANSWER, USER, ANSWER)]
    assert unused == ["difficulty", "messages.content.cache_control", "messages.thoughts"]
    assert convert({"prompt": [USER], "completion": [odd]}).unused == ["messages.thoughts"]


TEXT = {"type": "text", "text": "q"}
NO_TEXT = "content: expected a text or a list of parts with a text each"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([TEXT | {"image": "a.png"}], "content.image: expected records without it, as Pipetune trains on text alone"),
        ([TEXT, {"type": "image_url", "image_url": {"url": "u"}}], NO_TEXT),
        ([TEXT, {"type": "image_url", "text": "", "image_url": {"url": "u"}}], NO_TEXT),
        ([TEXT, {"type": "image", "text": ""}], NO_TEXT),
        ({"answer": 5}, NO_TEXT),
        (TEXT | {"images": ["a.png"]}, "content.images: expected records without it"),
    ],
)
def test_what_is_no_text_is_refused(content: Any, reason: str) -> None:
    line = refusal({"messages": [USER | {"content": content}, ANSWER]})
    assert line.startswith(f"field messages[0].{reason}")


@pytest.mark.parametrize(
    "content", [TEXT, {"text": "q"}, [TEXT], [TEXT | {"image": None}], [{"type": None, "text": "q"}]]
)
def test_a_part_of_text_is_its_text(content: Any) -> None:
    assert convert({"messages": [USER | {"content": content}, ANSWER]}).records == [chat(USER, ANSWER)]


def test_what_a_tool_gives_back_may_be_an_object() -> None:
    result = RESULT | {"content": {"rain": True}}
    (record,) = convert({"messages": [USER, CALLING, result, ANSWER]}).records
    assert record == chat(USER, CALLING, RESULT | {"content": '{"rain": true}'}, ANSWER)


@pytest.mark.parametrize("field", [{"reasoning_content": "t"}, {"tool_calls": [{"function": CALL}]}])
def test_only_the_assistant_thinks_and_calls(field: dict[str, Any]) -> None:
    (name,) = field
    line = refusal({"messages": [ANSWER, USER | field, ANSWER]})
    assert line == f"field messages[1].{name}: expected it of the assistant alone, not of user"
