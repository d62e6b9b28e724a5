"""Marked answers and classes: what each layout of such records trains, and what is left out and counted."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.errors import DataError
from data.inspection.summary import table
from data.settings import Wanted
from tests.data.helpers import as_lists, runs_of, supervised
from tests.data.records.test_judged_sets import refusal
from tests.data.records.test_preferences import (
    BAD,
    CLASS_NAMES,
    CLASSES,
    GOOD,
    JSON,
    MARKED,
    MARKED_GOOD,
    ONE_TURN,
    Q,
    halves,
    said,
    user,
)


@pytest.fixture
def load(load_judged: Any) -> Any:
    return load_judged


@pytest.mark.parametrize("name", MARKED_GOOD)
def test_marked_answers(name: str, load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    bad = {"prompt": Q, "completion": BAD, "label": False}
    dataset = load(MARKED_GOOD[name], bad, wanted=MARKED)
    assert dataset.values.tolist() == [1.0, 0.0] and not dataset.first.any()
    texts = [supervised(runs_of(as_lists(sample), tokenizer)) for sample in dataset.samples]
    assert texts == [[f"{GOOD}<|im_end|>"], [f"{BAD}<|im_end|>"]]
    assert dataset.types == ["marked"] and not dataset.unused


@pytest.mark.parametrize("name", ONE_TURN)
def test_pairs_are_answers_that_are_marked_by_themselves(
    name: str, load: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    pair, dataset = load(ONE_TURN[name]), load(ONE_TURN[name], wanted=MARKED)
    assert dataset.values.tolist() == [1, 0] and dataset.types == ["marked"]
    for half, sample in zip(halves(pair.samples[0]), dataset.samples, strict=True):
        assert list(half["input_ids"]) == list(sample["input_ids"]) and list(half["labels"]) == list(sample["labels"])


def test_a_mark_of_a_whole_pair_is_not_used(load: Any) -> None:
    dataset = load(ONE_TURN["trl, implicit"] | {"label": False}, wanted=MARKED)
    assert dataset.values.tolist() == [1, 0] and list(dataset.unused) == ["label"]


def test_the_best_of_a_list_is_desirable_once(load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    record = {"prompt": Q, "responses": [BAD, GOOD, "No.", GOOD + "!"], "scores": [1, 5, 2, 5]}
    dataset = load(record, wanted=MARKED)
    texts = [supervised(runs_of(as_lists(sample), tokenizer))[0] for sample in dataset.samples]
    assert [text.removesuffix("<|im_end|>") for text in texts] == [GOOD, BAD, "No."]
    assert dataset.values.tolist() == [1, 0, 0]


def test_both_classes_are_counted_with_what_is_left_out(load: Any) -> None:
    records = [
        {"prompt": Q, "completion": GOOD, "label": True},
        {"prompt": Q, "completion": "1", "label": True},  # a token, and the end
        {"prompt": Q, "completion": "", "label": False},
        {"prompt": Q, "completion": BAD * 99, "label": False},
        {"prompt": Q + " word" * 99, "completion": BAD, "label": False},
    ]
    dataset = load(*records, wanted=MARKED, limit=64)
    assert dataset.values.tolist() == [1, 1, 0, 0] and dataset.lengths.max() == 64
    good, bad = (dataset.tallies[next(key for key in dataset.tallies if key[1] == kind)] for kind in CLASS_NAMES)
    assert (good.records, good.samples, good.cut, good.silent, good.empty) == (2, 2, 0, 0, 0)
    assert (bad.records, bad.samples, bad.cut, bad.silent, bad.empty) == (3, 2, 2, 1, 1)
    rows = [line.split()[1:4] for line in table(dataset).splitlines()]
    assert ["desirable", "2", "2"] in rows and ["undesirable", "3", "2"] in rows
    with pytest.raises(
        DataError,
        match=r"all 2 answers are desirable \(of the others no token is trained within max_seq_len 64 \(1\)\); exp",
    ):
        load(*records[:2], records[4], wanted=MARKED, limit=64)


def test_bad_marks_are_refused_in_one_line(load: Any) -> None:
    assert refusal({"prompt": Q, "completion": GOOD}, MARKED).startswith("field label or kto_tag: missing")
    assert (
        refusal({"prompt": Q, "completion": GOOD, "label": 3}, MARKED) == "field label: expected true or false, found 3"
    )
    assert refusal({"text": "t", "label": 1}, MARKED).startswith("preference: expected a prompt and its answer")
    for label, word in zip((True, False), CLASS_NAMES, strict=True):
        with pytest.raises(DataError, match=f"a.jsonl: all 2 answers are {word}; expected some of either kind$"):
            load(*[{"prompt": Q, "completion": text, "label": label} for text in (GOOD, BAD)], wanted=MARKED)


def test_classes(load: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    records: list[JSON] = [
        {"text": "A number.", "label": "spam"},
        {"text": "A word.", "label": 0},
        {"messages": [user(Q), said(GOOD)], "label": "spam"},
    ]
    dataset = load(*records, wanted=Wanted("classes", ("ham", "spam")))
    assert dataset.values.tolist() == [1, 0, 1] and dataset.types == ["class"]
    texts = [runs_of(as_lists(sample), tokenizer) for sample in dataset.samples]
    assert texts[:2] == [[(True, "A number.")], [(True, "A word.")]], "no end of sequence follows"
    assert [sample["input_ids"].tolist() for sample in dataset.samples[:2]] == [
        tokenizer(each["text"])["input_ids"] for each in records[:2]
    ]
    assert len(texts[2]) == 1 and texts[2][0][0] and Q in texts[2][0][1]
    long = load({"text": "word " * 100, "label": 1}, wanted=CLASSES, limit=64)
    assert long.lengths.tolist() == [64], "cut, and not split"


@pytest.mark.parametrize("label", ["other", -1, 2, 0.5, None])
def test_bad_classes_are_refused_in_one_line(label: Any) -> None:
    line = refusal({"text": "t", "label": label}, Wanted("classes", ("ham", "spam")))
    if label is None:
        assert line.startswith("field label: missing")
    else:
        assert line == f"field label: expected a number from 0 or one of ham, spam; found {label!r}"
