"""Optimizers and learning-rate schedules, by name.

Parameters whose name matches one of `no_wd_kws` form a group without weight decay. Under CPU offload DeepSpeed's own
CPU optimizers take the place of torch's (compiled at first use), unless `zero_force_ds_cpu_optimizer` is false.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from training.config import TrainConfig
from training.config_sections import Optimizer, SchedulerParams
from training.errors import ConfigError

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def build_optimizer(config: TrainConfig, parameters: NamedParameters) -> torch.optim.Optimizer:
    """The optimizer of one stage.

    Raises:
        ConfigError: `optimizer.params` holds something that the optimizer does not take.
    """
    compiled = config.zero_optimization.offloads and config.zero_force_ds_cpu_optimizer
    builders = _CPU_OFFLOAD_BUILDERS if compiled else _BUILDERS
    kind = config.optimizer.type
    if kind not in builders:
        raise ConfigError(
            f"optimizer.type: {kind} cannot be offloaded; expected one of {', '.join(builders)}, "
            "or zero_force_ds_cpu_optimizer: false"
        )
    groups = parameter_groups(config.optimizer, parameters)
    try:
        return builders[kind](groups, **config.optimizer.params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"optimizer.params: {kind} does not take them: {error}") from None


def parameter_groups(optimizer: Optimizer, parameters: NamedParameters) -> list[dict[str, Any]]:
    """One group with weight decay and one without; empty ones are left out."""
    patterns = [re.compile(pattern) for pattern in optimizer.no_wd_kws]
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in parameters:
        (exempt if any(pattern.search(name) for pattern in patterns) else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    """The learning rate over `total_steps` optimizer steps; constant where the config has no scheduler."""
    if config.scheduler is None:
        return LambdaLR(optimizer, lambda step: 1.0)
    params = config.scheduler.params
    return LambdaLR(optimizer, lambda step: warmup_cosine(step, total_steps, params))


def warmup_cosine(step: int, total_steps: int, params: SchedulerParams) -> float:
    """The share of the full learning rate at `step` (from 0): a warm-up, then half a cosine down to `cos_min_ratio`.

    The curve of DeepSpeed's WarmupCosineLR, taken one step further: DeepSpeed's first two steps have the learning rate
    of the warm-up's start, usually 0, and do nothing; here the first step is already on its way up and the last one
    arrives at `cos_min_ratio`.
    """
    done = step + 1
    if done < params.warmup_num_steps:
        if params.warmup_type == "linear":
            risen = done / params.warmup_num_steps
        else:
            risen = math.log(done + 1) / math.log(params.warmup_num_steps + 1)
        return params.warmup_min_ratio + (1 - params.warmup_min_ratio) * risen
    progress = min(1.0, (done - params.warmup_num_steps) / max(1, total_steps - params.warmup_num_steps))
    return params.cos_min_ratio + (1 - params.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2


def _adamw(groups: Any, **params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True, **params)


def _adam(groups: Any, **params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, fused=True, **params)


def _sgd(groups: Any, **params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, **params)


def _lion(groups: Any, **params: Any) -> torch.optim.Optimizer:
    from lion_pytorch import Lion

    optimizer: torch.optim.Optimizer = Lion(groups, **params)
    return optimizer


def _cpu_adam(groups: Any, **params: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **params)
    return optimizer


def _cpu_lion(groups: Any, **params: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.lion import DeepSpeedCPULion

    optimizer: torch.optim.Optimizer = DeepSpeedCPULion(groups, **params)
    return optimizer


_Builder = Callable[..., torch.optim.Optimizer]
_BUILDERS: dict[str, _Builder] = {"AdamW": _adamw, "Adam": _adam, "Lion": _lion, "SGD": _sgd}
_CPU_OFFLOAD_BUILDERS: dict[str, _Builder] = {"AdamW": _cpu_adam, "Lion": _cpu_lion}
