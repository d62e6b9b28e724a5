"""A case has the mark of the tier that its name is listed for, and a name that no case has is an error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import tiered

NAMES = ("one", "two", "three")


def marks(**tiers: Any) -> list[str]:
    """The mark of each case; empty for what `make test` runs."""
    return ["".join(mark.name for mark in case.marks) for case in tiered(NAMES, **tiers)]


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ({"quick": ["one"]}, ["", "slow", "slow"]),
        ({"slow": ["t*"]}, ["", "slow", "slow"]),
        ({"quick": ["one"], "slow": ["two"]}, ["", "slow", "longest"]),
        ({"quick": [], "longest": ["three"]}, ["slow", "slow", "longest"]),
    ],
)
def test_the_tier_that_is_not_named_has_the_rest(tiers: dict[str, Any], expected: list[str]) -> None:
    assert marks(**tiers) == expected


def test_arguments_are_joined_to_a_name() -> None:
    assert [case.id for case in tiered([("a", 1), ("b", None)], slow=["b-None"])] == ["a-1", "b-None"]


def test_a_name_without_a_case_or_with_two_tiers_is_an_error() -> None:
    with pytest.raises(ValueError, match="four: no case has this name"):
        tiered(NAMES, slow=["four"])
    with pytest.raises(ValueError, match="one: in two tiers"):
        tiered(NAMES, quick=["one"], slow=["o*"])
