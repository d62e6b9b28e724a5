"""The metrics of a completed step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic_core


@dataclass
class StepMetrics:
    """One step's line of metrics.jsonl.

    Attributes:
        step, epoch: from 1.
        loss: mean over the trained tokens of the global batch.
        grad_norm: of the whole gradient, before clipping.
        samples, tokens, supervised: of the global batch without padding; `supervised` are the trained tokens.
        tokens_per_s: of all processes.
        seconds: wall time of the step.
        mfu: share of the devices' peak FLOP/s that the model used; None if the peak is unknown.
        times: part of the step -> seconds of rank 0 since the line before (`training.engine.trainer`).
        measures: what else a callback counted, each a number of its own in the line.
        peak_memory: peak bytes so far of each stage's largest process.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    samples: int
    tokens: int
    supervised: int
    tokens_per_s: float
    seconds: float
    mfu: float | None = None
    times: dict[str, float] = field(default_factory=dict)
    peak_memory: list[int] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)


def shown_measures(metrics: StepMetrics, names: Mapping[str, str]) -> str:
    """Write measures for the screen, each behind two blanks; `names` has what they are called there."""
    known = {name: metrics.measures[measure] for name, measure in names.items() if measure in metrics.measures}
    return "".join(f"  {name} {value:.2f}" for name, value in known.items())


def to_json(values: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Convert to JSON; numbers that are not finite become null."""
    return pydantic_core.to_json(values, indent=indent, inf_nan_mode="null")
