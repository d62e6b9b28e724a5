"""The prediction of weight streaming: every layer is in a slot, and it pays where a pipeline waits or does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from options.planner.measurements import Measured
from options.planner.plan import Plan
from options.weight_streaming.plan import Streaming
from tests.options.planner.helpers import basis_of, config_of, llama

KEYS: dict[str, Any] = {
    "bf16": {"enabled": True},
    "fp16": {},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "packing": False,
}


@pytest.mark.parametrize("gpus", [1, 8])
def test_all_layers_are_computed_and_gpus_hardly_wait(gpus: int, tmp_path: Path) -> None:
    spec = llama(tmp_path)
    basis = basis_of(spec, config_of(tmp_path, gpus, train_batch_size=64, **KEYS), "RTX4090")
    streaming, pipeline = Streaming(basis, gpus), Plan.make(basis)
    plan = streaming.best()
    assert plan is not None and sum(plan.slots.forward) == sum(plan.slots.backward) == spec.n_layers - 1
    work = 64 * (sum(streaming.forward) + sum(streaming.backward))
    assert plan.step.work == pytest.approx(work) and plan.seconds * gpus > work
    # Few micro-batches: the update alone, for which all wait, is a tenth of the step of eight GPUs.
    assert plan.bubble < (0.03 if gpus == 1 else 0.2)
    assert plan.memory <= (basis.device.memory or 0)
    assert gpus == 1 or (pipeline.fits and plan.tokens_per_s > 1.05 * pipeline.tokens_per_s)
    assert pipeline.fits == (gpus == 8)  # one such GPU does not hold 16-bit weights and sums of 7 billion parameters


def test_neither_gpus_nor_measurements_change_how_many_turns_share_the_head(tmp_path: Path) -> None:
    """As each has sums of its own, a resumed run would have other last bits."""
    spec = llama(tmp_path)
    counts = set()
    for gpus in (1, 8):
        basis = basis_of(spec, config_of(tmp_path, gpus, train_batch_size=64, **KEYS), "RTX4090")
        layers = spec.n_layers
        measured = Measured(
            conditions={},
            steps=(1, 2),
            parts=[layers],
            seconds=[1],
            peaks=[1],
            layers=[1] * (layers - 1) + [9],
            beyond=[0],
        )
        counts |= {Streaming(each, gpus).heads for each in (basis, replace(basis, measured=measured))}
    assert len(counts) == 1


def test_what_fits_no_gpu_in_turns_either_has_no_plan(tmp_path: Path) -> None:
    config = config_of(tmp_path, 8, train_micro_batch_size_per_gpu=32, **KEYS)
    assert Streaming(basis_of(llama(tmp_path, "llama-65b"), config, "T4"), 8).best() is None
