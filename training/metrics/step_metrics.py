"""What is known of a step when it is done."""

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
        loss: mean over the supervised tokens of the global batch.
        grad_norm: of the whole gradient, before clipping.
        samples, tokens, supervised: of the global batch, padding not counted.
        tokens_per_s, seconds: of all processes, over the step's wall time.
        mfu: the share of the devices' peak arithmetic that the model itself needed; None where the peak is not known.
        times: seconds of rank 0 by part since the line before, see `training.engine.timings`.
        peak_memory: bytes that the largest process of each stage had at most so far.
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


def to_json(values: Mapping[str, Any], indent: int | None = None) -> bytes:
    """JSON in which numbers that are not finite are null."""
    return pydantic_core.to_json(values, indent=indent, inf_nan_mode="null")
