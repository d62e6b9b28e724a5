"""Learning-rate schedules: the factor of the optimizer's lr at each step.

A schedule is a pure function of the step and the run's number of steps, so a resumed run continues with the same rates.
All begin with the same warm-up and differ in their decay. A step uses the rate at its end: the first step is above the
warm-up's start, the last warm-up step has the full rate, and the run's last step has the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from training.config.sections import ConstantParams, LinearParams, Scheduler, WarmUp, WarmupCosineParams, WSDParams


class LearningRate:
    """Sets the optimizer's rate for each step; DeepSpeed's own schedulers do not advance in skipped steps.

    Args:
        scheduler: None for a constant rate.
        total_steps: of the run.
    """

    def __init__(self, optimizer: Optimizer, scheduler: Scheduler | None, total_steps: int) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._total_steps = total_steps

    def set(self, step: int) -> float:
        """Set the learning rate of a step, counted from 1, before it is taken; return it."""
        lr: float = self._optimizer.defaults["lr"]
        if self._scheduler:
            lr *= lr_ratio(step - 1, self._total_steps, self._scheduler)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr


def lr_ratio(step: int, total_steps: int, scheduler: Scheduler) -> float:
    """Return the factor of the full learning rate at `step`, counted from 0."""
    return _SCHEDULES[scheduler.type](step, total_steps, scheduler.params)


def warmup_cosine(step: int, total_steps: int, params: WarmupCosineParams) -> float:
    """Warm up, then follow half a cosine down to `cos_min_ratio`.

    DeepSpeed's WarmupCosineLR, one step ahead: DeepSpeed's first two steps have the learning rate of the warm-up's
    start, usually 0, and do nothing.
    """
    progress = _progress(step, _top(params), total_steps)
    return _risen(step, params) * _between(params.cos_min_ratio, (1 + math.cos(math.pi * progress)) / 2)


def linear(step: int, total_steps: int, params: LinearParams) -> float:
    """Warm up, then follow a straight line down to `min_ratio`: DeepSpeed's WarmupDecayLR, one step ahead."""
    return _risen(step, params) * _between(params.min_ratio, 1 - _progress(step, _top(params), total_steps))


def constant(step: int, total_steps: int, params: ConstantParams) -> float:
    """Warm up, then keep the full rate: DeepSpeed's WarmupLR, one step ahead."""
    return _risen(step, params)


def warmup_stable_decay(step: int, total_steps: int, params: WSDParams) -> float:
    """Warm up, keep the full rate, and decay to `min_ratio` at the end (WSD, arXiv:2404.06395, section 4).

    The decay takes `decay_ratio` of all steps, at least one, and starts after the warm-up. Its shape is
    1 - sqrt(progress), steep at first, which arXiv:2405.18392 finds better than a straight line.
    """
    decay_steps = max(1, round(params.decay_ratio * total_steps))
    progress = _progress(step, max(_top(params), total_steps - decay_steps), total_steps)
    return _risen(step, params) * _between(params.min_ratio, 1 - math.sqrt(progress))


def _top(params: WarmUp) -> int:
    """Return the step, counted from 1, at which the warm-up reaches the full rate."""
    return max(1, params.warmup_num_steps)


def _risen(step: int, params: WarmUp) -> float:
    """Return the warm-up's factor: 1 when it is over."""
    done, top = step + 1, _top(params)
    if done >= top:
        return 1.0
    risen = done / top if params.warmup_type == "linear" else math.log(done + 1) / math.log(top + 1)
    return _between(params.warmup_min_ratio, risen)


def _progress(step: int, start: int, total_steps: int) -> float:
    """Return the progress of a decay that begins after `start` steps: 0 before it, 1 at the run's last step."""
    return min(1.0, max(0.0, (step + 1 - start) / max(1, total_steps - start)))


def _between(least: float, height: float) -> float:
    return least + (1 - least) * height


_SCHEDULES: dict[str, Callable[[int, int, Any], float]] = {
    "WarmupCosineLR": warmup_cosine,
    "linear": linear,
    "constant": constant,
    "WSD": warmup_stable_decay,
}
