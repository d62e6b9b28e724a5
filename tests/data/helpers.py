"""What the tests of the data wing share: a record of each type, reading, and a sample's text cut where loss begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.messages import said_in
from data.chat.prompts import PromptFormat, Prompts
from data.errors import DataError
from data.records import pairs
from data.records.chat import Chat
from data.records.formats import convert
from data.records.raw_records import read_file
from data.records.reading import BadRecords, parse
from data.records.record import Pretrain, Record, Segments, Tokenized, origin
from data.records.sources import files_of
from data.sample_set import Sample
from data.settings import OnBadRecord, Source
from data.tokenized.tokenize import encode, encode_question, encode_tokens
from tests.data.template_styles import Style

Runs = list[tuple[bool, str]]
REWRITING = Prompts("chat_template", template_fallback="rewrite")
# The fields of preferences.
FIELDS = {"margin", *pairs.CHOSEN, *pairs.REJECTED, *pairs.MARKS, *pairs.RANKED, *pairs.BY_SCORE, *pairs.BY_RANK}
FIELDS |= {name for two in pairs.SCORES for name in two}

ACTION = {
    "inner_thought": "先查层数 🤔.",
    "api_name": "count_layers",
    "api_param": {"blocks": 30, "名": "块"},
    "api_res": "32 层 ✅",
}
SECOND_ACTION = {"inner_thought": "Now the sum.", "api_name": "sum", "api_param": {}, "api_res": {"sum": [32]}}
RECORDS: dict[str, dict[str, Any]] = {
    "pretrain": {"type": "pretrain", "text": "雪 falls 🤗 on 8 GPUs.\n\nThe end."},
    "instruct": {"type": "instruct", "instruct": "Name a family.", "output": "llama, 也有 qwen3 🦙."},
    "instruct with input": {"type": "instruct", "instruct": "Translate.", "input": "你好 🤗", "output": "Hello!"},
    "conversation": {
        "type": "conversation",
        "rounds": [
            ["ask", "I have 8 GPUs."],
            ["ask", "怎样划分？"],
            ["ans", "Set dims to [8, 1]."],
            ["ask", "Why 34?"],
            ["ans", "32 blocks + 2 🎉"],
            ["ans", "So parts sum to 34."],
        ],
    },
    "api_param as an object": {
        "type": "conver_has_api",
        "api_desc": "count_layers(blocks)",
        "rounds": [["ask", "几层？"], ["ans-api", {"actions": [ACTION, SECOND_ACTION], "ans": "32 层。"}]],
    },
    "api_param as a string": {
        "type": "conver_has_api",
        "api_desc": "count_layers(blocks)",
        "rounds": [
            ["ask", "Hi."],
            ["ans", "Ask me."],
            ["ask", "几层？"],
            ["ans-api", {"actions": [ACTION | {"api_param": json.dumps(ACTION["api_param"])}], "ans": "32 层。"}],
        ],
    },
    "ref_qa": {
        "type": "ref_qa",
        "reference": "Lion keeps one state.",
        "rounds": [["ask", "How many?"], ["ans", "One."], ["ask", "And AdamW?"], ["ans", "两个。"]],
    },
}


def parse_record(raw: dict[str, Any]) -> Record:
    (record,) = convert(raw).records
    return record


def read(
    sources: Sequence[Source], on_bad_record: OnBadRecord, log: Callable[[str], None]
) -> Iterator[tuple[tuple[Path, int], Record]]:
    """All the records of some sources, with their files and numbers there: what a build does before it tokenizes."""
    bad = BadRecords(on_bad_record, log)
    for source in sources:
        for file in files_of(source):
            for raw in read_file(file, source.format):
                try:
                    records = parse(raw, source.format, source.columns).records
                except DataError as error:
                    bad.add(f"{origin(str(file), raw.number)}: {error}")
                else:
                    yield from (((file, raw.number), record) for record in records)
    bad.finish()


def good(path: Path, **options: Any) -> list[Record]:
    """All the records of files without a mistake."""
    return [record for _, record in read([Source(path=str(path), **options)], "stop", pytest.fail)]


def runs(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat | None = None) -> Runs:
    """The encoded record as (supervised, decoded text), cut where supervision changes."""
    return runs_of(encode(record, tokenizer, 100_000, prompt_format), tokenizer)


def runs_of(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Runs:
    pairs = zip(sample["input_ids"], sample["labels"], strict=True)
    return [
        (supervised, text_of([token for token, _ in run], tokenizer))
        for supervised, run in groupby(pairs, key=lambda pair: pair[1] != -100)
    ]


def supervised_texts(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat | None = None
) -> list[str]:
    """The supervised pieces of an encoded record, in order."""
    return [text for supervised, text in runs(record, tokenizer, prompt_format) if supervised]


def text_of(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The exact text of some tokens, with the white space that sentencepiece's own decoding drops."""
    if "▁" not in tokenizer.get_vocab():
        return str(tokenizer.decode(ids))
    pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(ids)]
    raw = b"".join(
        bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
        for piece in pieces
    )
    return raw.decode("utf-8")  # fails where a character is cut


def question_ids(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat, turns: int = 1
) -> list[int]:
    """What a model is asked with to get the record's answer number `turns`."""
    parsed = parse_record(record)
    assert not isinstance(parsed, (Pretrain, Chat, Segments, Tokenized))
    said = said_in(parsed)
    answers = [place for place, each in enumerate(said) if each.role == "assistant"]
    return encode_question(said[: answers[turns - 1]], tokenizer, prompt_format)


def as_lists(sample: Sample) -> Sample:
    """A sample out of a file, whose values are arrays, with lists."""
    return {"input_ids": list(map(int, sample["input_ids"])), "labels": list(map(int, sample["labels"]))}


def chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Chat:
    return Chat.model_validate({"messages": messages, "tools": tools or []})


def runs_under(style: Style, record: Chat, tokenizer: PreTrainedTokenizerBase, prompts: Prompts = REWRITING) -> Runs:
    return runs_of(encode_tokens(record, style.put_on(tokenizer), prompts).sample(), tokenizer)


def supervised(runs: Runs) -> list[str]:
    return [text for loss, text in runs if loss]


def whole_text(runs: Runs) -> str:
    return "".join(text for _, text in runs)


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
