"""Dialogues that are too long are cut as `truncate` says; `oldest` keeps the last turn that is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import Prompts
from data.errors import DataError
from data.inspection.summary import warnings
from data.settings import Mask, Truncate
from data.tokenized.columns import OLDEST
from data.tokenized.dataset import Dataset
from data.tokenized.encoder import QUESTION_LAST
from data.tokenized.loading import load_dataset
from data.tokenized.tokenize import encode_tokens
from tests.data.helpers import as_lists, chat, rendered, runs_of, supervised, whole_text

JSON = dict[str, Any]
LIMIT = 320
ROLES = ("user", "assistant") * 8
WORDS = [f"{role} {number // 2}: " + "word " * 50 for number, role in enumerate(ROLES)]
PROMPTS = Prompts("chat_template")


def talk(*words: str, silent: int | None = None) -> JSON:
    said = [{"role": role, "content": text} for role, text in zip(ROLES, words, strict=False)]
    return {"messages": [each | {"weight": 0} if n == silent else each for n, each in enumerate(said)]}


def rounds(*words: str, kind: str = "conversation") -> JSON:
    turns = [["ans" if role == "assistant" else "ask", text] for role, text in zip(ROLES, words, strict=False)]
    return {"type": kind, "rounds": turns} | ({"reference": "r"} if kind == "ref_qa" else {})


@pytest.fixture
def load(tmp_path: Path, tokenizer_folder: Path) -> Any:
    def run(*records: JSON, limit: int = LIMIT, how: Truncate = "oldest", prompts: Prompts = PROMPTS) -> Dataset:
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        return load_dataset(str(path), tokenizer_folder, limit, prompts, truncate=how, cache_dir=tmp_path / "cache")

    return run


def texts(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [whole_text(runs_of(as_lists(sample), tokenizer)) for sample in dataset.samples]


@pytest.mark.parametrize("mask", get_args(Mask))
@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
@pytest.mark.parametrize(
    ("record", "last"),
    [
        (talk(*WORDS[:8]), 7),
        (talk(*WORDS[:7]), 5),
        (talk(*WORDS[:5], "long " * 200, "bye"), 5),
        (rounds(*WORDS[:7]), 5),
        (rounds(*WORDS[:6], "bye", kind="ref_qa"), 5),
    ],
)
def test_the_last_answer_is_trained_whatever_follows_it(
    record: JSON, last: int, prompt_format: str, mask: Mask, load: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    dataset = load(record, prompts=Prompts(prompt_format, mask=mask))
    (sample,) = dataset.samples
    runs = runs_of(as_lists(sample), tokenizer)
    said = record["messages"][last]["content"] if "messages" in record else record["rounds"][last][1]
    assert said.split(":")[0][:14] in "".join(supervised(runs))
    assert f"user {last // 2}:" in whole_text(runs)
    assert "user 0:" not in whole_text(runs)
    assert len(sample["input_ids"]) <= LIMIT
    assert {note for note, *_ in dataset.notes} - {QUESTION_LAST} == {OLDEST}


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
def test_an_answer_without_weight_is_no_reason_to_drop_one_with(
    prompt_format: str, load: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    (sample,) = load(talk(*WORDS[:6], silent=5), prompts=Prompts(prompt_format)).samples
    (answer,) = supervised(runs_of(as_lists(sample), tokenizer))
    assert answer.startswith("assistant 1:")


def test_dialogues_are_cut_as_it_is_asked_for(load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    system: JSON = {"role": "system", "content": "Be brief."}
    long, short = talk(*WORDS)["messages"], talk("A", "B", "C", "D")
    records = {"messages": [system, *long]}, rounds(*WORDS), short
    limit = len(encode_tokens(chat([system, *long]), tokenizer).ids) // 2
    *cut, whole = texts(load(*records, limit=limit, how="turns"), tokenizer)
    assert all("assistant 0:" in text and "assistant 7:" not in text for text in cut)
    assert whole == rendered(tokenizer, short["messages"])
    dataset = load(*records, limit=limit)
    *cut, whole = texts(dataset, tokenizer)
    assert whole == rendered(tokenizer, short["messages"])
    for first, text in zip(([system], []), cut, strict=True):
        assert "assistant 0:" not in text and "assistant 7:" in text
        assert ("Be brief." in text) == bool(first)
        kept = [each for each in long if each["content"] in text]
        assert kept == long[-len(kept) :] and kept[0]["role"] == "user"
        assert len(encode_tokens(chat(first + long[-len(kept) - 2 :]), tokenizer).ids) > limit, "one turn more fits"
    assert [(note, count) for note, count, _ in dataset.notes] == [(OLDEST, 2)]
    assert any(f"2 records: {OLDEST}" in line for line in warnings(dataset, limit))
    refused = rf"record 1: .*tokens; expected at most max_seq_len, {limit} \(truncate: refuse\)"
    with pytest.raises(DataError, match=refused):
        load(*records, limit=limit, how="refuse")
    # Where not even the last turn fits, it is cut like a text, and what was left out before it is noted all the same.
    dataset = load(talk(*WORDS[:-1], "word " * 800), limit=limit)
    assert [(note, count) for note, count, _ in dataset.notes] == [(OLDEST, 1)]
    (last,) = texts(dataset, tokenizer)
    assert "user 7:" in last and "user 6:" not in last and len(dataset.samples[0]["input_ids"]) == limit
