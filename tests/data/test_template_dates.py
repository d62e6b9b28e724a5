"""A template that writes today's date says so; a date among its arguments is the text that it has in YAML."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from data.chat import chat_template
from data.chat.chat_template import DATED
from data.chat.prompts import Prompts
from data.records.fields import TemplateArguments
from data.tokenized.tokenize import Tokens, encode_many
from tests.data.helpers import RECORDS, chat
from tests.data.template_styles import SMOLLM2

TODAY = datetime.datetime(2026, 1, 2)
DEFAULT = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return TODAY


def encoded(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any], record: Any) -> Tokens:
    (tokens,) = encode_many([record], tokenizer, Prompts("chat_template", arguments))
    assert isinstance(tokens, Tokens), tokens
    return tokens


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "datetime", Clock)


@pytest.mark.parametrize("record", [RECORDS["instruct"], chat(TALK)])
def test_todays_date_is_told(record: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    SMOLLM2.put_on(tokenizer)
    tokenizer.chat_template = DEFAULT + "{{ 'Today: ' + date_string + '\\n' }}" + SMOLLM2.template
    for _ in range(2):
        tokens = encoded(tokenizer, {}, record)
        assert tokens.notes == {DATED: "02 Jan 2026"}
        assert "Today: 02 Jan 2026" in tokenizer.decode(tokens.ids)
    assert not encoded(tokenizer, {"date_string": "26 Jul 2024"}, record).notes


def test_a_date_that_is_not_written_is_not_told(tokenizer: PreTrainedTokenizerBase) -> None:
    SMOLLM2.put_on(tokenizer)
    tokenizer.chat_template = (
        "{% set today = strftime_now('%Y') %}{% if tools %}{{ today }}{% endif %}" + SMOLLM2.template
    )
    assert not encoded(tokenizer, {}, chat(TALK)).notes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime.date(2024, 7, 26), "2024-07-26"),
        ([datetime.datetime(2024, 7, 26, 1, 2)], ["2024-07-26T01:02:00"]),
        ({"a": [1, None, True, "x"]}, {"a": [1, None, True, "x"]}),
    ],
)
def test_a_date_is_taken_as_its_text(value: Any, expected: Any) -> None:
    assert TypeAdapter(TemplateArguments).validate_python({"date_string": value}) == {"date_string": expected}


@pytest.mark.parametrize("value", [{1, 2}, b"x", float("nan"), {(1, 2): 3}, [object()]])
def test_what_json_does_not_have_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(TemplateArguments).validate_python({"a": 1, "when": value})
    (error,) = caught.value.errors()
    assert error["msg"] == "when: expected a value of JSON or a date"
