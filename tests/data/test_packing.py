"""Shows that packing loses nothing, never exceeds the limit, and leaves little room unused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.packing import best_fit, choose_row_length, level

LIMIT = 64
lengths_within = st.lists(st.integers(1, LIMIT), max_size=200)


@given(lengths_within)
def test_best_fit_holds_each_sample_once_within_the_limit(lengths: list[int]) -> None:
    rows = best_fit(lengths, LIMIT)
    assert sorted(position for row in rows for position in row) == list(range(len(lengths)))
    sums = [sum(lengths[position] for position in row) for row in rows]
    assert all(0 < tokens <= LIMIT for tokens in sums)
    # Two rows that fit into one would have been one.
    assert all(first + second > LIMIT for first, second in zip(sorted(sums), sorted(sums)[1:], strict=False))
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // LIMIT) * 1.5 + 1


def test_best_fit_takes_the_fullest_row_with_room() -> None:
    assert best_fit([50, 40, 20, 10, 24], LIMIT) == [[0, 3], [1, 4], [2]]


def test_a_sample_above_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens"):
        best_fit([3, 65], LIMIT)


@given(lengths_within, st.integers(1, 6))
def test_level_rows_are_a_multiple_and_no_more_than_needed(lengths: list[int], multiple: int) -> None:
    rows = level(lengths, LIMIT, multiple)
    assert sorted(position for row in rows for position in row) == list(range(len(lengths)))
    assert all(sum(lengths[position] for position in row) <= LIMIT for row in rows)
    assert len(rows) == -(-len(best_fit(lengths, LIMIT)) // multiple) * multiple


def test_level_rows_are_about_equally_long() -> None:
    generator = random.Random(0)
    lengths = [generator.randrange(20, 400) for _ in range(128)]
    rows = level(lengths, 2048, 4)
    sums = [sum(lengths[position] for position in row) for row in rows]
    assert min(sums) > 0.97 * max(sums)


def test_row_length_keeps_the_pipeline_busy_within_bounds() -> None:
    assert choose_row_length(160, 500, 2048, 128, 1, 1, 2) == 2048  # 20,480 tokens in at least 8 micro-batches
    assert choose_row_length(160, 500, 2048, 128, 1, 1, 4) == 1280
    assert choose_row_length(160, 1500, 2048, 128, 1, 1, 4) == 1500
    assert choose_row_length(160, 500, 2048, 128, 1, 4, 2) == 640
