"""Learning-rate schedules: the factor of the optimizer's lr at each step.

A schedule is a pure function of the step and the run's number of steps, so a resumed run continues with the same rates.
All begin with the same warm-up and differ in their decay. A step uses the rate at its end: the first step is above the
warm-up's start, the last warm-up step has the full rate, and the run's last step has the smallest. DeepSpeed's own
schedules are one step behind: their first two steps have the rate of the warm-up's start, usually 0, and do nothing.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

from training.config.optimization import LinearParams, Scheduler, WarmupCosineParams, WSDParams


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
        """Set the learning rate of a step, counted from 1, before it is taken; return it, without factors of groups."""
        lr: float = self._optimizer.defaults["lr"]
        if self._scheduler:
            lr *= lr_ratio(step - 1, self._total_steps, self._scheduler)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        return lr


def lr_ratio(step: int, total_steps: int, scheduler: Scheduler) -> float:
    """Return the factor of the full learning rate at `step`, counted from 0.

    After the warm-up, WarmupCosineLR follows half a cosine down to `cos_min_ratio`, and linear a straight line to
    `min_ratio`; constant stays. WSD (arXiv:2404.06395, section 4) stays too, and decays in the last `decay_ratio` of
    all steps, at least one: by 1 - sqrt(progress), which arXiv:2405.18392 finds better than a straight line.
    """
    params, done = scheduler.params, step + 1
    warm_up = params.warmup_num_steps or math.ceil(params.warmup_ratio * total_steps)
    top = max(1, warm_up)  # the step that reaches the full rate
    if done < top:
        risen = done / top if params.warmup_type == "linear" else math.log(done + 1) / math.log(top + 1)
        return _between(params.warmup_min_ratio, risen)
    if isinstance(params, WSDParams):
        start = max(top, total_steps - max(1, round(params.decay_ratio * total_steps)))
        return _between(params.min_ratio, 1 - math.sqrt(_progress(done, start, total_steps)))
    progress = _progress(done, top, total_steps)
    if isinstance(params, WarmupCosineParams):
        return _between(params.cos_min_ratio, (1 + math.cos(math.pi * progress)) / 2)
    return _between(params.min_ratio, 1 - progress) if isinstance(params, LinearParams) else 1.0


def _progress(done: int, start: int, total_steps: int) -> float:
    """Return the progress of a decay after `start` steps: 0 before it, 1 at the run's last step."""
    return min(1.0, max(0.0, (done - start) / max(1, total_steps - start)))


def _between(least: float, height: float) -> float:
    return least + (1 - least) * height
