"""Learning-rate schedules: which share of the optimizer's lr a step has.

A schedule is a pure function of the step and of the number of steps in the run, so that a run that stops anywhere goes
on with the rate it would have had. All begin with the same warm-up and differ in how they fall. Each step has the rate
that stands at its end: the first one is already on its way up, the warm-up's last one and the first of a run without
warm-up have the full rate, and the run's last one arrives at the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from training.config.sections import ConstantParams, LinearParams, Scheduler, WarmUp, WarmupCosineParams, WSDParams


class LearningRate:
    """Gives the optimizer the rate of each step; DeepSpeed, which stands still in left-out steps, has no part in it.

    Args:
        scheduler: a constant rate where absent.
        total_steps: of the run.
    """

    def __init__(self, optimizer: Optimizer, scheduler: Scheduler | None, total_steps: int) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._total_steps = total_steps

    def set(self, step: int) -> float:
        """Give all weights the learning rate of a step, counted from 1, before it is taken."""
        lr: float = self._optimizer.defaults["lr"]
        if self._scheduler:
            lr *= lr_ratio(step - 1, self._total_steps, self._scheduler)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr


def lr_ratio(step: int, total_steps: int, scheduler: Scheduler) -> float:
    """The share of the full learning rate at `step`, counted from 0, of a run of `total_steps`."""
    return _SCHEDULES[scheduler.type](step, total_steps, scheduler.params)


def warmup_cosine(step: int, total_steps: int, params: WarmupCosineParams) -> float:
    """A warm-up, then half a cosine down to `cos_min_ratio`.

    The curve of DeepSpeed's WarmupCosineLR, taken one step further: DeepSpeed's first two steps have the learning rate
    of the warm-up's start, usually 0, and do nothing.
    """
    progress = _progress(step, _top(params), total_steps)
    return _risen(step, params) * _between(params.cos_min_ratio, (1 + math.cos(math.pi * progress)) / 2)


def linear(step: int, total_steps: int, params: LinearParams) -> float:
    """A warm-up, then a straight line down to `min_ratio`: DeepSpeed's WarmupDecayLR, taken one step further."""
    return _risen(step, params) * _between(params.min_ratio, 1 - _progress(step, _top(params), total_steps))


def constant(step: int, total_steps: int, params: ConstantParams) -> float:
    """A warm-up, then the full rate: DeepSpeed's WarmupLR, taken one step further."""
    return _risen(step, params)


def warmup_stable_decay(step: int, total_steps: int, params: WSDParams) -> float:
    """A warm-up, the full rate, and in the run's last part a decay to `min_ratio` (WSD, arXiv:2404.06395, section 4).

    The decay takes the share `decay_ratio` of all steps, at least one, and waits for the warm-up. Its shape is
    1 - sqrt(progress), steep at first, which arXiv:2405.18392 finds better than a straight line.
    """
    decay_steps = max(1, round(params.decay_ratio * total_steps))
    progress = _progress(step, max(_top(params), total_steps - decay_steps), total_steps)
    return _risen(step, params) * _between(params.min_ratio, 1 - math.sqrt(progress))


def _top(params: WarmUp) -> int:
    """How many steps have been taken when the rate is full."""
    return max(1, params.warmup_num_steps)


def _risen(step: int, params: WarmUp) -> float:
    """How far the warm-up has come: 1 when it is over."""
    done, top = step + 1, _top(params)
    if done >= top:
        return 1.0
    risen = done / top if params.warmup_type == "linear" else math.log(done + 1) / math.log(top + 1)
    return _between(params.warmup_min_ratio, risen)


def _progress(step: int, start: int, total_steps: int) -> float:
    """How far the fall that begins after `start` steps has come: 0 before it, 1 at the run's last step."""
    return min(1.0, max(0.0, (step + 1 - start) / max(1, total_steps - start)))


def _between(least: float, height: float) -> float:
    return least + (1 - least) * height


_SCHEDULES: dict[str, Callable[[int, int, Any], float]] = {
    "WarmupCosineLR": warmup_cosine,
    "linear": linear,
    "constant": constant,
    "WSD": warmup_stable_decay,
}
