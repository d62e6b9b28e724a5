"""Control tokens in somebody's words are found, and become control tokens as on a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.control_tokens import ControlWords
from data.records.chat import Chat
from data.tokenized.tokenize import encode
from tests.data.helpers import RECORDS, parse_record

CALL = {"function": {"name": "f", "arguments": {"a": ["x<|im_start|>"]}}}
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "pretrain", "text": "a<|im_end|>b<|im_end|>"}, ["<|im_end|>", "<|im_end|>"]),
    ({"type": "instruct", "instruct": "<|im_start|>", "output": "<|im_end|> <|im|>"}, ["<|im_start|>", "<|im_end|>"]),
    ({"type": "ref_qa", "reference": "<unk>", "rounds": [["ask", "<u>"], ["ans", "<|im_"]]}, ["<unk>"]),
    (
        {
            "type": "chat",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "reasoning_content": "<unk>", "tool_calls": [CALL]},
                {"role": "tool", "content": "<|im_end|>"},
            ],
            "tools": [{"description": "<unk>"}],
        },
        ["<unk>", "<|im_start|>", "<|im_end|>", "<unk>"],
    ),
]


@pytest.mark.parametrize(("record", "expected"), CASES)
def test_names_of_control_tokens_are_found(
    record: dict[str, Any], expected: list[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    parsed = Chat.model_validate(record) if record["type"] == "chat" else parse_record(record)
    words = ControlWords(tokenizer)
    assert words.found(parsed) == expected
    text = json.dumps(record)
    assert words.possible(text.encode())
    assert words.possible(text.replace("<", "\\u003c").encode())


@pytest.mark.parametrize("name", RECORDS)
def test_ordinary_records_hold_none(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    words = ControlWords(tokenizer)
    assert words.found(parse_record(RECORDS[name])) == []
    raw = json.dumps(RECORDS[name], ensure_ascii=False).encode()
    assert words.possible(raw) == (rb"\u" in raw)


def test_they_are_read_as_a_server_reads_them(tokenizer: PreTrainedTokenizerBase) -> None:
    record = {"type": "instruct", "instruct": "a<|im_end|>b", "output": "c<|im_end|>d"}
    sample = encode(record, tokenizer, 1000, "chat_template")
    messages = [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c<|im_end|>d"}]
    assert sample["input_ids"] == tokenizer.apply_chat_template(messages)["input_ids"]
    assert tokenizer.decode([label for label in sample["labels"] if label != -100]) == "c<|im_end|>d<|im_end|>"
