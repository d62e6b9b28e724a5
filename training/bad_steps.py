"""Handle steps whose loss or gradient is not finite: skip, count, and trace them to the records that made them.

Such a step changes no weight (see `training.engine.pipeline` and `training.config.deepspeed_config`). A few in a row
end the run, which would learn nothing more. The samples of the last one then pass through the model one by one: those
that give no finite loss are named. Where all of them do, the weights are at fault, not a record.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tqdm import tqdm

from common.terminal import paused
from training.callbacks import Callback
from training.errors import RunRefused

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics

SHOWN = 20  # records


class BadSteps(Callback):
    """Count bad steps in a row, and end the run after `max_bad_steps`."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def on_start(self, run: Run) -> None:
        self._scaler = getattr(run.trainer.engine.optimizer, "loss_scaler", None)
        if self._scaler and self._scaler.dynamic:
            self._scaler.raise_error_at_min_scale = False  # it would name no record

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        scaler = self._scaler
        falling = scaler and scaler.dynamic and scaler.cur_scale > scaler.min_scale  # fp16 is finding its loss scale
        if math.isfinite(metrics.loss) and (falling or math.isfinite(metrics.grad_norm)):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        scaled = f" at a loss scale of {scaler.cur_scale:g}" if scaler and scaler.cur_scale != 1 else ""
        norm = f"the gradient's norm {metrics.grad_norm:g}{scaled}"
        what = f"step {metrics.step}: the loss is {metrics.loss:g}, {norm}"
        if self._in_a_row < run.config.max_bad_steps:
            run.progress.log.print(f"warning: {what}; the step changes nothing")
            return
        times = f"{self._in_a_row} steps in a row" if self._in_a_row > 1 else "one step"
        raise RunRefused(f"{what}; ended after {times} (max_bad_steps); {find_cause(run, batch)}")


def find_cause(run: Run, batch: GlobalBatch) -> str:
    """Evaluate the samples of a batch one by one, and name those without a finite loss."""
    numbers = sorted(batch.samples)
    bad = []
    with paused():
        for number in tqdm(numbers, "looking for the records", disable=run.progress.log.quiet or None, leave=False):
            if not math.isfinite(run.trainer.eval_loss(run.loader, run.loader.batch_of([number]))):
                bad.append(number)
            run.mark("a sample alone")
    if not bad:
        return "each of its records alone gives a finite loss: expected a lower learning rate or fp32"
    if len(bad) == len(numbers):
        return "so does each of its records alone: the weights are spoilt, or the learning rate is too high"
    more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return f"no finite loss from {', '.join(map(run.origin, bad[:SHOWN]))}{more}"
