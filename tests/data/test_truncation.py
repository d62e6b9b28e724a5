"""`truncate: oldest` keeps the last turn with an answer that bears loss, whatever follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from data.chat.prompts import Mask, Prompts
from data.tokenized.columns import OLDEST
from data.tokenized.dataset import Dataset, load_dataset
from data.tokenized.tokenize import load_tokenizer
from tests.data.helpers import runs_of, supervised, whole_text
from tests.data.test_prompts import as_lists

LIMIT = 320
WORDS = [f"{role} {number}: " + "word " * 50 for number in range(4) for role in ("user", "assistant")]
ROLES = ("user", "assistant") * 4
SILENT = {"weight": 0}


def chat(*words: str, **silent: dict[str, Any]) -> dict[str, Any]:
    roles = zip(ROLES, words, strict=False)
    return {
        "messages": [
            {"role": role, "content": text, **silent.get(f"_{place}", {})} for place, (role, text) in enumerate(roles)
        ]
    }


def rounds(*words: str, kind: str = "conversation") -> dict[str, Any]:
    turns = [["ans" if role == "assistant" else "ask", text] for role, text in zip(ROLES, words, strict=False)]
    return {"type": kind, "rounds": turns} | ({"reference": "r"} if kind == "ref_qa" else {})


@pytest.mark.parametrize("mask", get_args(Mask))
@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
@pytest.mark.parametrize(
    ("record", "last"),
    [
        (chat(*WORDS), 7),
        (chat(*WORDS[:7]), 5),
        (chat(*WORDS[:6], "bye"), 5),
        (chat(*WORDS[:5], "long " * 200, "bye"), 5),
        (rounds(*WORDS[:7]), 5),
        (rounds(*WORDS[:6], "bye", kind="ref_qa"), 5),
    ],
)
def test_the_last_answer_is_trained(
    record: dict[str, Any], last: int, prompt_format: str, mask: Mask, tmp_path: Path, tokenizer_folder: Path
) -> None:
    dataset = loaded(record, Prompts(prompt_format, mask=mask), tmp_path, tokenizer_folder)
    (sample,) = dataset.samples
    runs = runs_of(as_lists(sample), load_tokenizer(tokenizer_folder))
    said = record["messages"][last]["content"] if "messages" in record else record["rounds"][last][1]
    begun = said.split(":")[0][:14]
    assert begun in "".join(supervised(runs))
    assert f"user {last // 2}:" in whole_text(runs)
    assert "user 0:" not in whole_text(runs)
    assert len(sample["input_ids"]) <= LIMIT
    assert [note for note, *_ in dataset.notes] == [OLDEST]


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
def test_an_answer_without_loss_is_no_reason_to_drop_one_with(
    prompt_format: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    record = chat(*WORDS[:6], _5=SILENT)
    (sample,) = loaded(record, Prompts(prompt_format), tmp_path, tokenizer_folder).samples
    (answer,) = supervised(runs_of(as_lists(sample), load_tokenizer(tokenizer_folder)))
    assert answer.startswith("assistant 1:")


def loaded(record: dict[str, Any], prompts: Prompts, folder: Path, tokenizer: Path) -> Dataset:
    path = folder / "a.jsonl"
    path.write_text(json.dumps(record))
    return load_dataset(str(path), tokenizer, LIMIT, prompts, truncate="oldest", cache_dir=folder / "cache")
