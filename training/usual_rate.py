"""Know the usual learning rate of a method: a rule of thumb, for `--auto` and for a warning.

Fine-tuning all of 7B weights with AdamW takes some 2e-5, smaller models more. Adapters take about ten times as much
(docs/adapters.md), and an objective says what share of it is usual for its loss (`Objective.rate_share`).
"""

from __future__ import annotations

import math
from itertools import chain

from models.family import EMBEDDING_WEIGHT
from models.spec import ModelSpec
from training.config.keys import TrainConfig

LR, LR_OF, SLOWEST, FASTEST = 2e-5, 7e9, 5e-6, 2e-4
OF_ADAPTERS = 10
FAR = 10  # times the usual rate, from which on a run is warned


def usual_rate(config: TrainConfig, spec: ModelSpec) -> tuple[float, str]:
    """Compute the usual rate of a config's method, and say the rule."""
    shapes = chain.from_iterable(spec.shapes(layer).values() for layer in range(spec.n_layers))
    weights = sum(shape.numel() for shape in shapes)
    if spec.tied:
        weights -= spec.shapes(0)[EMBEDDING_WEIGHT].numel()
    rate = min(max(LR * math.sqrt(LR_OF / weights), SLOWEST), FASTEST)
    why = f"2e-5 at 7B weights, times the root of 7B / weights, at most 2e-4: {weights / 1e9:.2g}B here"

    if (share := config.objective.rate_share) != 1:
        rate, why = rate * share, f"{why}; times {share:g}, as usual for this loss"
    if config.lora:
        rate, why = rate * OF_ADAPTERS, f"{why}; times {OF_ADAPTERS}, as usual for adapters"
    return float(f"{rate:.1g}"), why


def rate_warnings(config: TrainConfig, spec: ModelSpec) -> list[str]:
    """Warn of a rate that is far above the usual one, as that of another method is."""
    rate, (usual, _) = config.optimizer.params.get("lr", 0.0), usual_rate(config, spec)
    if config.from_scratch or config.optimizer.type not in ("AdamW", "Adam") or rate < FAR * usual:
        return []
    times = f"{rate / usual:,.0f} times what is usual for this method and size of model, some {usual:g}"
    return [f"warning: optimizer.params.lr: {rate:g} is {times}"]
