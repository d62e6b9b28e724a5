"""The shipped example records are whole, varied and true: what they mention exists in the repository."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import PromptFormat
from data.records.record import KINDS
from data.tokenized.tokenize import encode
from tests.conftest import FAQ, ROOT
from tests.data.helpers import parse_record
from tests.docs.faq_claims import complaints

RAW: list[dict[str, Any]] = json.loads(FAQ.read_text(encoding="utf-8"))
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


def test_what_the_records_say_about_the_program_is_so() -> None:
    assert complaints(RAW) == []


@pytest.mark.parametrize(
    ("true", "false", "complaint"),
    [
        ("eight model families: baichuan, ", "eight model families: ", "eight model families: there are baichuan"),
        ("eight model families", "nine model families", "nine model families: there are"),
        ("its own: pretrain, instruct, ", "its own: pretrain, ", "five record types: there are"),
        ("use_grad_ckpt: true", "use_grad_ckpt: maybe", "use_grad_ckpt: maybe: not taken"),
        ("use_grad_ckpt: true", "use_grad_checkpoint: true", "use_grad_checkpoint: no"),
        ("shorter max_seq_len", "shorter max_seq_length", "max_seq_length: no such name"),
        ("optimizer.params.lr=1.0e-5", "optimiser.params.lr=1.0e-5", "unknown key optimiser"),
        ("hg_to_pp --input-path", "hg_to_pp --input-dir", "not understood"),
        ("train_ds.py --config configs", "train.py --config configs", "train.py: not there"),
        ("add --greedy", "add --gready", "--gready: no such option"),
        ("--hostfile ./hostfile", "--hosts ./hostfile", "not understood"),
        ("offload_optimizer: {device: cpu}", "offload_optimizer: {device: disk}", "not taken"),
        ("metrics.jsonl", "metrics.csv.jsonl", "metrics.csv.jsonl: no file"),
        ("the loss, lr, grad_norm", "the loss, lr, gradient_norm", "gradient_norm: no such name"),
        ("layer_00-model_states.pt", "layer_0-model_states.pt", "no file that Pipetune writes"),
        ("CSV, TSV, Parquet", "CSV, Parquet", ".tsv: not among the file formats"),
        ("train_ds.py, train_ds_zero.py, convert", "train_ds.py, convert", "doors: there are"),
        ("prompt_texts.py holds", "texts.py holds", "data/texts.py: not there"),
        ('\\"output\\": \\"Lima.\\"', '\\"answer\\": \\"Lima.\\"', "field output: missing"),
        ("make lint runs", "make check runs", "make check: no such target"),
    ],
)
def test_a_falsehood_would_be_found(true: str, false: str, complaint: str) -> None:
    text = FAQ.read_text(encoding="utf-8")
    assert true in text
    assert any(complaint in line for line in complaints(json.loads(text.replace(true, false))))


@pytest.mark.parametrize(
    "question", json.loads((ROOT / "quickstart" / "questions.json").read_text(encoding="utf-8")), ids=lambda q: q["ask"]
)
def test_the_quickstart_asks_what_the_records_answer(question: dict[str, Any]) -> None:
    """In the same words, or in others; then some record has the answer."""
    answers = dict(questions_and_answers())
    known = [answers[question["ask"]]] if question["ask"] in answers else answers.values()
    assert any(all(each in answer for each in question["require"]) for answer in known)
