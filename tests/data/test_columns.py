"""Samples are cut and split as promised, counted, and laid out as a plain loop would do it."""

from __future__ import annotations

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenized.columns import Encoded, as_columns
from data.tokenized.tokenize import Tokens


def make(length: int, runs: list[tuple[int, int]], kind: str = "conversation", first: int = 1) -> Encoded:
    return Encoded(0, 1, kind, False, False, Tokens(list(range(first, first + length)), runs))


def samples_of(batch: pyarrow.RecordBatch) -> list[tuple[list[int], list[int]]]:
    """Ids and labels, read from the columns in the plainest way."""
    made = []
    for row in batch.to_pylist():
        ids, runs = row["input_ids"], row["runs"]
        bears = {place for begin, end in zip(runs[::2], runs[1::2], strict=True) for place in range(begin, end)}
        made.append((ids, [token if place in bears else -100 for place, token in enumerate(ids)]))
    return made


def test_an_over_long_dialogue_is_cut_after_the_last_turn_that_fits() -> None:
    batch, tallies = as_columns([make(20, [(3, 6), (8, 11), (14, 19)])], limit=13)
    ((ids, labels),) = samples_of(batch)
    assert ids == list(range(1, 12))
    assert [label != -100 for label in labels].count(True) == 6
    tally = tallies[0, "conversation"]
    assert (tally.cut, tally.cut_at_turn, tally.longest, tally.tokens, tally.supervised) == (1, 1, 20, 11, 6)


@pytest.mark.parametrize(("limit", "length"), [(11, 11), (12, 11), (10, 6), (13, 11)])
def test_a_turn_that_ends_at_the_limit_fits(limit: int, length: int) -> None:
    ((ids, _),) = samples_of(as_columns([make(20, [(3, 6), (8, 11), (14, 19)])], limit)[0])
    assert len(ids) == length


def test_where_no_turn_fits_the_first_one_is_cut() -> None:
    batch, tallies = as_columns([make(20, [(3, 15)])], limit=10)
    ((ids, labels),) = samples_of(batch)
    assert (len(ids), labels.count(-100)) == (10, 3)
    assert tallies[0, "conversation"].cut_at_turn == 0


def test_an_over_long_text_is_split() -> None:
    batch, tallies = as_columns([make(21, [(0, 21)], "pretrain"), make(5, [(0, 5)], "pretrain")], limit=10)
    pieces = samples_of(batch)
    assert [len(ids) for ids, _ in pieces] == [10, 10, 5]  # the 21st token alone has nothing to predict it
    assert [token for ids, _ in pieces[:2] for token in ids] == list(range(1, 21))
    assert all(ids == labels for ids, labels in pieces)
    assert batch["supervised"].to_pylist() == [9, 9, 4]
    assert batch["record"].to_pylist() == [1, 1, 1]
    tally = tallies[0, "pretrain"]
    assert (tally.records, tally.samples, tally.split, tally.cut, tally.silent) == (2, 3, 1, 0, 0)


def test_a_sample_whose_only_loss_is_on_its_first_token_is_left_out() -> None:
    batch, tallies = as_columns([make(4, [(0, 1)]), make(0, [])], limit=10)
    assert batch.num_rows == 0
    assert tallies[0, "conversation"].silent == 2


def test_equal_samples_have_equal_digests_and_others_do_not() -> None:
    pair = [make(6, [(2, 4)]), make(6, [(2, 4)])]
    others = [make(6, [(2, 5)]), make(6, [(2, 4)], first=2), make(5, [(2, 4)]), make(6, [(2, 3), (3, 4)], first=9)]
    digests = as_columns(pair + others, 10)[0]["digest"].to_pylist()
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["pretrain", "chat"]), st.lists(st.booleans(), max_size=25)), min_size=1, max_size=8
    ),
    st.integers(2, 12),
)
def test_columns_hold_what_a_plain_loop_would_make(cases: list[tuple[str, list[bool]]], limit: int) -> None:
    encoded, wanted, first = [], [], 1
    for kind, bears in cases:
        ids = list(range(first, first + len(bears)))
        first += len(bears)
        labels = [token if loud else -100 for token, loud in zip(ids, bears, strict=True)]
        loss = [(place, place + 1) for place, loud in enumerate(bears) if loud]
        encoded.append(Encoded(0, 1, kind, False, False, Tokens(ids, loss)))
        if kind == "pretrain":
            cuts = [(start, start + limit) for start in range(0, len(ids), limit)]
        else:
            turns = [end for end in range(2, limit + 1) if end < len(ids) and bears[end - 1] and not bears[end]]
            cuts = [(0, turns[-1] if len(ids) > limit and turns else limit)]
        pieces = [(ids[begin:end], labels[begin:end]) for begin, end in cuts]
        wanted += [(its, own) for its, own in pieces if any(label != -100 for label in own[1:])]
    batch, tallies = as_columns(encoded, limit)
    assert samples_of(batch) == wanted
    assert batch["supervised"].to_pylist() == [sum(label != -100 for label in labels[1:]) for _, labels in wanted]
    total = sum(tally.tokens for tally in tallies.values())
    assert total == sum(len(ids) for ids, _ in wanted)
