"""What judged records say against each other, or against themselves, is told or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from data.errors import DataError
from data.inspection.summary import warnings
from data.records.formats import convert
from data.settings import Wanted
from data.tokenized.dataset import Dataset
from tests.data.caches import JUDGED_LIMIT

JSON = dict[str, Any]
PAIRS, REWARDS, MARKED = Wanted("pairs"), Wanted("rewards"), Wanted("marked")
PAIR: JSON = {"prompt": "What is 1?", "chosen": "A number.", "rejected": "A word."}


def refusal(raw: JSON, wanted: Wanted = PAIRS) -> str:
    with pytest.raises(DataError) as refused:
        convert(raw, preference=wanted)
    (line,) = str(refused.value).splitlines()
    return line


def warned(dataset: Dataset, words: str) -> str:
    """The one warning that has some words; empty where there is none."""
    lines = [line for line in warnings(dataset, JUDGED_LIMIT) if words in line]
    assert len(lines) < 2
    return "".join(lines)


@pytest.mark.parametrize(
    ("more", "margin"),
    [
        ({"margin": "3"}, 3.0),
        ({"margin": "2.5"}, 2.5),
        ({"margin": 3}, 3.0),
        ({"margin": ""}, 0.0),
        ({"score_chosen": "4", "score_rejected": "1.5"}, 2.5),
        ({"score_chosen": "good", "score_rejected": "bad"}, 0.0),
        ({"chosen_score": 4, "rejected_score": "4"}, 0.0),
    ],
)
def test_a_margin_may_be_a_text_as_tables_have_it(more: JSON, margin: float) -> None:
    (judged,) = convert(PAIR | more, preference=PAIRS).judged
    assert judged.value == margin


def test_scores_of_a_list_may_be_texts() -> None:
    judged = convert({"prompt": "q", "responses": ["a", "b"], "scores": ["1", "3"]}, preference=PAIRS).judged
    assert [each.value for each in judged] == [2.0] and judged[0].documents[0].output == "b"


@pytest.mark.parametrize("margin", ["high", "nan", True, [3], {"a": 1}, "1e40"])
def test_a_margin_that_is_no_number_is_refused(margin: Any) -> None:
    assert refusal(PAIR | {"margin": margin}) == f"field margin: expected a number, found {margin!r}"


@pytest.mark.parametrize("wanted", [PAIRS, REWARDS])
@pytest.mark.parametrize(
    "more",
    [
        {"score_chosen": 2.0, "score_rejected": 9.0},
        {"chosen_score": "2", "rejected_score": 9},
        {"margin": -7},
        {"margin": "-7.0"},
    ],
)
def test_pairs_whose_scores_are_the_wrong_way_round_are_told(more: JSON, wanted: Wanted, load_judged: Any) -> None:
    dataset = load_judged(PAIR, PAIR | more, PAIR | {"chosen": "1"} | more, wanted=wanted)
    assert dataset.values.tolist() == [0.0, -7.0, -7.0]
    line = warned(dataset, "margin")
    assert line.startswith("2 records: the margin, or score_chosen minus score_rejected, is below 0")
    assert line.endswith("a.jsonl: record 2 (-7)")
    assert not warned(load_judged(PAIR | {"margin": 0}, wanted=wanted), "margin")


def tokens(ids: list[int], trained_from: int) -> JSON:
    return {"input_ids": ids, "labels": [-100] * trained_from + ids[trained_from:]}


SAME = tokens([5, 6, 7], 2)


@pytest.mark.parametrize("wanted", [PAIRS, REWARDS, MARKED])
@pytest.mark.parametrize(
    ("chosen", "rejected", "place"),
    [
        (SAME, tokens([9, 6, 7, 8], 2), 0),  # another prompt
        (SAME, tokens([5, 6, 7, 8], 3), 2),  # trained in one answer, prompt in the other
        (SAME, tokens([5, 7], 1), 1),  # a shorter prompt
        (tokens([5, 6, 9, 7], 3), tokens([5, 6, 8], 2), 2),
    ],
)
def test_token_ids_of_another_prompt_are_refused(chosen: JSON, rejected: JSON, place: int, wanted: Wanted) -> None:
    assert refusal({"chosen": chosen, "rejected": rejected}, wanted) == (
        f"field rejected: input_ids[{place}] is another one than in chosen, or trained in one of them alone; expected "
        "another answer to the same prompt"
    )


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        (SAME, tokens([5, 6, 8, 9], 2)),
        (SAME, tokens([5, 6, 7, 8], 2)),
        ({"input_ids": [5, 6, 7]}, {"input_ids": [5, 8]}),
        (
            {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]},
            {"input_ids": [5, 9, 7, 8], "labels": [-100, 9, -100, 8]},
        ),
    ],
)
def test_token_ids_of_one_prompt_are_taken(chosen: JSON, rejected: JSON) -> None:
    assert convert({"chosen": chosen, "rejected": rejected}, preference=PAIRS).judged


UNTRAINED, ARE_EQUAL = "no token is trained within max_seq_len 64", "both answers are equal within max_seq_len 64"
EQUAL = PAIR | {"rejected": PAIR["chosen"]}
LONG: JSON = {"prompt": "word " * 100, "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("records", "line"),
    [
        ([EQUAL, EQUAL], f"{ARE_EQUAL} (2); expected answers that differ"),
        ([LONG], f"{UNTRAINED} (1); expected a larger limit"),
        ([EQUAL, LONG], f"{UNTRAINED} (1), {ARE_EQUAL} (1); expected a larger limit"),
        ([{"prompt": "q"}], "bad records are skipped (1); expected some that can be read"),
        ([EQUAL, {"prompt": "q"}, {}], f"{ARE_EQUAL} (1), bad records are skipped (2); expected answers that differ"),
    ],
)
def test_why_nothing_is_left_is_said(records: list[JSON], line: str, load_judged: Any) -> None:
    with pytest.raises(DataError) as refused:
        load_judged(*records, limit=64, on_bad_record="skip")
    assert str(refused.value).endswith(f"a.jsonl: {line}")


def test_pairs_that_the_limit_makes_equal_are_told_as_that(load_judged: Any) -> None:
    with pytest.raises(DataError, match=rf"{ARE_EQUAL} \(2\); expected answers that differ"):
        load_judged(LONG, LONG, limit=64, wanted=REWARDS)


def test_skipped_marks_are_told_where_one_class_is_left(load_judged: Any) -> None:
    records = [{"prompt": "q", "completion": "a", "label": label} for label in (True, "good", 7)]
    with pytest.raises(
        DataError, match=r"all 1 answers are desirable \(of the others bad records are skipped \(2\)\); expected"
    ):
        load_judged(*records, wanted=MARKED, on_bad_record="skip")


def test_answers_that_are_marked_both_ways_are_told(load_judged: Any) -> None:
    good, bad = ({"prompt": "q", "completion": "a", "label": label} for label in (True, False))
    other = {"prompt": "r", "completion": "a", "label": True}
    dataset = load_judged(good, other, bad, bad, good, wanted=MARKED)
    line = warned(dataset, "marked")
    assert line.startswith("1 record: the same as another one, but marked or classed otherwise; such as ")
    assert line.endswith("a.jsonl: record 3")
    assert dataset.duplicates == 2
    assert not warned(load_judged(good, other, bad | {"prompt": "s"}, wanted=MARKED), "marked")


def test_texts_of_several_classes_are_told(load_judged: Any) -> None:
    records = [{"text": text, "label": label} for text, label in (("a", 0), ("a", 2), ("b", 1), ("a", 1), ("b", 1))]
    dataset = load_judged(*records, wanted=Wanted("classes"))
    assert warned(dataset, "marked").startswith("2 records: the same as another one, but")
    assert dataset.values.tolist() == [0, 2, 1, 1, 1] and len({*dataset.digests.tolist()}) == 4


def test_pairs_of_two_margins_are_no_contradiction(load_judged: Any) -> None:
    assert not warned(load_judged(PAIR, PAIR | {"margin": 1}), "marked")
