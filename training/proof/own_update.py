"""Learning rate and optimizer of the reference, written a second time, straight from the config.

A mistake in `training.optimizer` must not be in both the run and what it is compared with, so nothing here uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from lion_pytorch import Lion
from torch import Tensor

from training.config.keys import TrainConfig
from training.errors import ConfigError


def own_optimizer(
    config: TrainConfig, weights: Mapping[str, Tensor], tied: tuple[str, str] | None
) -> torch.optim.Optimizer:
    """Make torch's optimizer with a group for each weight.

    Raises:
        ConfigError: the optimizer has no such parameter.
    """
    kind, params = config.optimizer.type, config.optimizer.params
    if config.zero_optimization.offloads and config.zero_force_ds_cpu_optimizer:  # DeepSpeed's have another default
        params = {"weight_decay": 0.0} | params
    groups = []
    for name, weight in weights.items():
        names = " ".join(tied) if tied and name in tied else name
        exempt = any(pattern.search(each) for pattern in config.optimizer.no_wd_kws for each in names.split())
        groups.append({"params": [weight]} | ({"weight_decay": 0.0} if exempt else {}))
    try:
        made: torch.optim.Optimizer = (Lion if kind == "Lion" else getattr(torch.optim, kind))(groups, **params)
        return made
    except TypeError as error:
        raise ConfigError(f"optimizer.params: {kind} of torch does not have all of them: {error}") from None


def own_rate(config: TrainConfig, step: int) -> float:
    """Compute the learning rate of a step, counted from 1, by the formulas of docs/configuration.md."""
    rate = float(config.optimizer.params["lr"])
    if config.scheduler is None:
        return rate
    kind, params, total = config.scheduler.type, config.scheduler.params.model_dump(), config.max_steps or 1
    top = start = max(1, params["warmup_num_steps"])
    if step < top:
        rise = step / top if params["warmup_type"] == "linear" else math.log(step + 1, top + 1)
        rate *= params["warmup_min_ratio"] * (1 - rise) + rise
    if kind == "WSD":
        start = max(top, total - max(1, round(params["decay_ratio"] * total)))
    fallen = 0.0 if step <= start else min(1.0, (step - start) / (total - start)) if total > start else 1.0
    left = {
        "WarmupCosineLR": math.cos(math.pi * fallen / 2) ** 2,
        "linear": 1 - fallen,
        "WSD": 1 - fallen**0.5,
        "constant": 1.0,
    }[kind]
    least = params.get("cos_min_ratio", params.get("min_ratio", 0.0))
    return rate * (least * (1 - left) + left)
