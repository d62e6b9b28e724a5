"""The plan's speed beside runs that others measured: no constant was fitted to them."""

from __future__ import annotations

import pytest

from benchmarks.roofline import PUBLISHED, Published, llama_7b

WITHIN = 0.25
EAGER, FLASH = ([run for run in PUBLISHED if run.devices == "A100-40G" and bool(run.attention) == on] for on in (1, 0))


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_a_published_speed_is_within_a_quarter(run: Published) -> None:
    assert run.planned_speed(run.plan()) == pytest.approx(run.speed, rel=WITHIN)


@pytest.mark.parametrize("runs", [EAGER, FLASH], ids=["eager", "flash"])
def test_longer_rows_cost_what_they_cost(runs: list[Published]) -> None:
    """In the order that was measured, and from the first to the last row by about the same factor."""
    planned = [run.planned_speed(run.plan()) for run in runs]
    measured = [run.speed for run in runs]
    assert len(runs) == 4 and measured == sorted(measured, reverse=True)
    assert planned == sorted(planned, reverse=True)
    assert planned[0] / planned[-1] == pytest.approx(measured[0] / measured[-1], rel=WITHIN)


@pytest.mark.parametrize("device", ["H100", "H200"])
def test_a_compiled_llama_reaches_what_can_be_reached(device: str) -> None:
    """More than half of the peak, as the best published runs do, and less than large products alone."""
    plan, eager = llama_7b(device, compile=True), llama_7b(device)
    assert plan.mfu is not None and eager.mfu is not None
    assert 0.5 < plan.mfu < plan.basis.device.products
    assert eager.mfu < plan.mfu
