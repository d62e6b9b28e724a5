"""The learning rate over a run: bounds, the ends of the phases, and values by hand for each schedule."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config.optimization import ConstantParams, LinearParams, Scheduler, WarmUp, WarmupCosineParams, WSDParams
from training.optimizer.lr_schedules import lr_ratio

RATIO = st.floats(0, 1)
WARM_UP: dict[str, st.SearchStrategy[Any]] = {
    "warmup_num_steps": st.integers(0, 50),
    "warmup_min_ratio": RATIO,
    "warmup_type": st.sampled_from(["log", "linear"]),
}
SCHEDULERS = st.one_of(
    st.builds(Scheduler, params=st.builds(WarmupCosineParams, **WARM_UP, cos_min_ratio=RATIO)),
    st.builds(Scheduler, type=st.just("linear"), params=st.builds(LinearParams, **WARM_UP, min_ratio=RATIO)),
    st.builds(Scheduler, type=st.just("constant"), params=st.builds(ConstantParams, **WARM_UP)),
    st.builds(
        Scheduler,
        type=st.just("WSD"),
        params=st.builds(
            WSDParams, **WARM_UP, min_ratio=RATIO, decay_ratio=st.floats(0, 1, exclude_min=True, allow_subnormal=False)
        ),
    ),
)
TYPES: list[Any] = ["WarmupCosineLR", "linear", "constant", "WSD"]


def curve(total: int, kind: Any = "WarmupCosineLR", **params: Any) -> list[float]:
    scheduler = Scheduler.model_validate({"type": kind, "params": params})
    return [lr_ratio(step, total, scheduler) for step in range(total)]


def least(params: WarmUp) -> float:
    """Where a schedule ends."""
    return next((getattr(params, name) for name in ("cos_min_ratio", "min_ratio") if hasattr(params, name)), 1.0)


@given(scheduler=SCHEDULERS, total=st.integers(1, 80))
def test_a_curve_rises_to_one_and_falls_to_its_least(scheduler: Scheduler, total: int) -> None:
    params = scheduler.params
    top = max(params.warmup_num_steps, 1) - 1
    ratios = [lr_ratio(step, total, scheduler) for step in range(total)]
    rise, fall = ratios[: top + 1], ratios[top:]
    assert ratios[0] > 0.0
    assert all(params.warmup_min_ratio - 1e-12 <= ratio <= 1.0 + 1e-12 for ratio in rise)
    assert all(least(params) - 1e-12 <= ratio <= 1.0 + 1e-12 for ratio in fall)
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    if fall:
        assert fall[0] == pytest.approx(1.0, abs=1e-12)
    if len(fall) > 1:
        assert fall[-1] == pytest.approx(least(params), abs=1e-12)


@pytest.mark.parametrize(("total", "share", "steps"), [(21, 0.1, 3), (20, 0.25, 5), (20, 0.0, 0)])
@pytest.mark.parametrize("kind", TYPES)
def test_a_warm_up_may_be_a_share_of_the_steps(kind: str, total: int, share: float, steps: int) -> None:
    assert curve(total, kind, warmup_ratio=share) == curve(total, kind, warmup_num_steps=steps)


def test_a_warm_up_has_one_length() -> None:
    with pytest.raises(ValueError, match="warmup_num_steps and warmup_ratio are one length"):
        curve(4, warmup_ratio=0.1, warmup_num_steps=1)


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("kind", TYPES)
def test_a_long_run_has_no_jumps_where_the_phases_meet(kind: str, warmup_type: str) -> None:
    ratios = curve(20_000, kind, warmup_num_steps=1_000, warmup_type=warmup_type)
    assert max(abs(after - before) for before, after in pairwise(ratios[10:])) < 0.025


@pytest.mark.parametrize("kind", TYPES)
def test_a_step_after_the_last_one_keeps_its_rate(kind: Any) -> None:
    scheduler = Scheduler(type=kind)
    assert lr_ratio(25, 10, scheduler) == lr_ratio(9, 10, scheduler)


WSD = dict.fromkeys(range(3, 36), 1.0) | {35 + step: 1 - 0.8 * math.sqrt(step / 4) for step in (1, 2, 3, 4)}
HALF_A_COSINE = {3: 1.0, 5: 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 7: 0.55, 11: 0.1}
LOG = {step: math.log(step + 2) / math.log(5) for step in range(4)}
LATE = {"warmup_num_steps": 8, "decay_ratio": 0.5, "min_ratio": 0.0}


@pytest.mark.parametrize(
    ("kind", "total", "params", "values"),
    [
        ("WarmupCosineLR", 12, {"warmup_num_steps": 4, "cos_min_ratio": 0.1}, HALF_A_COSINE),
        ("linear", 6, {"warmup_num_steps": 2, "min_ratio": 0.2}, {1: 1.0, 2: 0.8, 3: 0.6, 4: 0.4, 5: 0.2}),
        ("constant", 6, {"warmup_num_steps": 2}, dict.fromkeys(range(1, 6), 1.0)),
        ("WSD", 40, {"warmup_num_steps": 4, "min_ratio": 0.2}, WSD),
        ("WSD", 40, {"decay_ratio": 0.5}, {19: 1.0, 20: 1 - 0.9999 * math.sqrt(1 / 20)}),
        # The decay takes a step at least, and waits for the warm-up.
        ("WSD", 3, {"min_ratio": 0.2}, {0: 1.0, 1: 1.0, 2: 0.2}),
        ("WSD", 10, LATE, {7: 1.0, 8: 1 - math.sqrt(1 / 2), 9: 0.0}),
        *((kind, 1, {}, {0: 1.0}) for kind in TYPES),
        # A warm-up, in whole and cut off by the end of the run.
        *((kind, 10, {"warmup_num_steps": 4}, LOG) for kind in TYPES),
        *(
            (kind, 10, {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_ratio": 0.2}, {0: 0.4, 2: 0.8})
            for kind in TYPES
        ),
        *((kind, 3, {"warmup_num_steps": 6, "warmup_type": "linear"}, {0: 1 / 6, 2: 3 / 6}) for kind in TYPES),
    ],
)
def test_values_by_hand(kind: str, total: int, params: dict[str, Any], values: dict[int, float]) -> None:
    ratios = curve(total, kind, **params)
    assert {step: ratios[step] for step in values} == pytest.approx(values)
