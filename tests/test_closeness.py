"""The bounds of rounding let through another order of sums, and nothing larger."""

from __future__ import annotations

import math

import pytest
import torch

from tests.closeness import ROUNDINGS, Roundings, assert_near, bound


def numbers() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def test_another_order_of_sums_is_near() -> None:
    one, other = numbers(), numbers().T.contiguous()
    upside_down = torch.arange(63, -1, -1)
    assert_near(one[:, upside_down] @ other[upside_down], one @ other)
    assert_near({"a": one, "b": [one, other]}, {"a": one, "b": [one, other]})


def test_an_entry_that_cancels_is_held_against_its_neighbours() -> None:
    expected = torch.tensor([1.0, 0.0])
    assert_near(expected + 1e-6, expected)
    with pytest.raises(AssertionError):
        assert_near(torch.tensor([1.0, 1e-3]), expected)


@pytest.mark.parametrize("kind", Roundings._fields)
def test_a_fault_of_a_thousandth_is_found_in_fp32(kind: str) -> None:
    assert bound(kind=kind) < 1e-3 / 4
    with pytest.raises(AssertionError, match=r"^q_proj: "):
        assert_near({"q_proj": numbers() * 1.001}, {"q_proj": numbers()}, kind=kind)


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_the_size_of_the_numbers_changes_nothing(dtype: torch.dtype) -> None:
    for size in (1e-6, 1.0, 1e6):
        expected = size * numbers().abs().clamp(max=1)
        assert_near(expected * (1 + bound(dtype) / 2), expected, dtype)
        with pytest.raises(AssertionError):
            assert_near(expected * (1 + 2 * bound(dtype)), expected, dtype)


@pytest.mark.parametrize(
    "found",
    [
        {"a": numbers() * math.nan},
        {"a": numbers()[0]},
        {"b": numbers()},
        {},
        {"a": numbers(), "b": numbers()},
        {"a": [numbers()]},
    ],
    ids=["no number", "another shape", "another name", "nothing", "one more", "a list"],
)
def test_what_cannot_be_compared_is_not_near(found: dict[str, torch.Tensor]) -> None:
    with pytest.raises((AssertionError, TypeError, ValueError)):
        assert_near(found, {"a": numbers()})


def test_losses_are_compared_as_they_come() -> None:
    assert_near([6.0, 5.5], [6.0, 5.5 + 1e-6], kind="means")
    for found in ([6.0], [6.0, 5.6]):
        with pytest.raises(AssertionError):
            assert_near(found, [6.0, 5.5], kind="means")
