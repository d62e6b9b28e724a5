"""The plan's speed beside runs that others measured: no constant was fitted to them."""

from __future__ import annotations

import pytest

from benchmarks.roofline import BF16, LLAMA, PUBLISHED, Published, Run

WITHIN = 0.25
A100 = [each for each in PUBLISHED if each.run.devices == "A100-40G"]
EAGER, FLASH = ([each for each in A100 if bool(each.run.attention) == on] for on in (True, False))


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)
def test_a_published_speed_is_within_a_quarter(published: Published) -> None:
    assert published.planned_speed(published.run.plan()) == pytest.approx(published.speed, rel=WITHIN)


@pytest.mark.parametrize("runs", [EAGER, FLASH], ids=["eager", "flash"])
def test_longer_rows_cost_what_they_cost(runs: list[Published]) -> None:
    """In the order that was measured, and from the first to the last row by about the same factor."""
    planned = [each.planned_speed(each.run.plan()) for each in runs]
    measured = [each.speed for each in runs]
    assert len(runs) == 4 and measured == sorted(measured, reverse=True)
    assert planned == sorted(planned, reverse=True)
    assert planned[0] / planned[-1] == pytest.approx(measured[0] / measured[-1], rel=WITHIN)


@pytest.mark.parametrize("device", ["H100", "H200"])
def test_a_compiled_llama_reaches_what_can_be_reached(device: str) -> None:
    """More than half of the peak, as the best published runs do, and less than large products alone."""
    plan, eager = (Run(LLAMA, device, (1, 1), 8, 4096, BF16 | {"compile": on}).plan() for on in (True, False))
    assert plan.mfu is not None and eager.mfu is not None
    assert 0.5 < plan.mfu < plan.basis.device.products
    assert eager.mfu < plan.mfu
