"""The shipped example records are whole, varied and true: what they mention exists in the repository."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import PromptFormat
from data.records.record import KINDS, parse_record
from data.tokenized.tokenize import encode
from tests.conftest import FAQ, ROOT

RAW: list[dict[str, Any]] = json.loads(FAQ.read_text(encoding="utf-8"))
WINGS = "models|data|training|configs|docs|tests|benchmarks|quickstart"
PATH = re.compile(rf"(?<![\w/.-])(?:(?:{WINGS})/[\w./-]*\w|[\w-]+\.py)\b")
TARGET = re.compile(r"\bmake ([a-z-]+)\b")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def questions_and_answers() -> list[tuple[str, str]]:
    """Every question with the answer that follows it; a pretrain record is an answer without question."""
    pairs: list[tuple[str, str]] = []
    for record in RAW:
        if record["type"] == "pretrain":
            pairs.append(("", record["text"]))
        elif record["type"] == "instruct":
            pairs.append((record["instruct"], record["output"]))
        for role, content in record.get("rounds", []):
            if role == "ask":
                pairs.append((content, ""))
            else:
                pairs[-1] = (pairs[-1][0], content if role == "ans" else content["ans"])
    return pairs


def mentioned(pattern: re.Pattern[str]) -> list[str]:
    return sorted({name for _, answer in questions_and_answers() for name in pattern.findall(answer)})


def test_there_are_many_records_of_every_type_in_two_languages() -> None:
    kinds = Counter(record.type for record in map(parse_record, RAW))
    assert sum(kinds.values()) >= 80
    assert set(kinds) == set(KINDS)
    for kind in KINDS:
        chinese = [bool(CHINESE.search(json.dumps(raw, ensure_ascii=False))) for raw in RAW if raw["type"] == kind]
        assert True in chinese, f"no Chinese {kind} record"
        assert False in chinese, f"no English {kind} record"


def test_no_question_stands_twice() -> None:
    counts = Counter(question for question, _ in questions_and_answers() if question)
    assert [question for question, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
def test_every_record_fits_into_512_tokens(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = [len(encode(record, tokenizer, 10_000, prompt_format)["input_ids"]) for record in RAW]
    assert max(lengths) <= 512


@pytest.mark.parametrize("path", mentioned(PATH))
def test_a_path_in_an_answer_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("target", mentioned(TARGET))
def test_a_make_target_in_an_answer_exists(target: str) -> None:
    assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_doors_are_among_the_paths_that_are_checked() -> None:
    assert {"train_ds.py", "convert_model.py", "demo.py", "configs/quickstart.yml"} <= set(mentioned(PATH))


@pytest.mark.parametrize(
    "question", json.loads((ROOT / "quickstart" / "questions.json").read_text(encoding="utf-8")), ids=lambda q: q["ask"]
)
def test_the_quickstart_asks_what_the_records_answer(question: dict[str, str]) -> None:
    answers = dict(questions_and_answers())
    assert question["expect"] in answers[question["ask"]]
