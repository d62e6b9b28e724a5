"""Counts, durations and sizes, as people write them."""

from __future__ import annotations

import pytest

from common.quantities import counted, duration, gigabytes


def test_one_thing_is_singular() -> None:
    assert [counted(number, "micro-batch") for number in (0, 1, 2)] == [
        "0 micro-batches",
        "1 micro-batch",
        "2 micro-batches",
    ]
    assert counted(1, "step") == "1 step" and counted(1200, "step") == "1,200 steps"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.00004, "0.04 ms"),
        (0.0042, "4.2 ms"),
        (0.9999, "1,000 ms"),
        (1, "1 s"),
        (17.304, "17.3 s"),
        (59.99, "60 s"),
        (60, "1 minute"),
        (60.1, "1 minute"),
        (90, "1.5 minutes"),
        (3600, "1 hour"),
        (9000, "2.5 hours"),
        (86_400, "1 day"),
        (20 * 86_400, "20 days"),
        (123_456 * 86_400, "123,456 days"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_gigabytes_are_powers_of_ten() -> None:
    assert gigabytes(40 * 2**30) == "42.95 GB" and gigabytes(4.2e6) == "0.0042 GB"
