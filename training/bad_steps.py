"""Steps whose loss or gradient is not finite: left out, counted, and traced to the records that made them.

Such a step changes no weight (see `training.engine.pipeline` and `training.config.deepspeed_config`). A few in a row
end the run, which would learn nothing more. The samples of the last one then pass through the model one by one: those
that give no finite loss are named. Where all of them do, the weights are at fault, not a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from tqdm import tqdm

from common.terminal import paused
from data.loader import GlobalBatch, Loader
from training.engine.trainer import Trainer
from training.errors import RunRefused

SHOWN = 20  # records


@dataclass
class BadSteps:
    """Counts bad steps in a row.

    Attributes:
        limit: how many end the run.
        origin: says of a sample's number where it comes from.
        mark: notes that the run has got somewhere.
    """

    trainer: Trainer
    limit: int
    origin: Callable[[int], str]
    log: Console
    mark: Callable[[str], None]
    in_a_row: int = 0

    def __post_init__(self) -> None:
        self._scaler = getattr(self.trainer.engine.optimizer, "loss_scaler", None)
        if self._scaler and self._scaler.dynamic:
            self._scaler.raise_error_at_min_scale = False  # without a word about the records

    def check(self, loader: Loader, batch: GlobalBatch, step: int, loss: float, grad_norm: float) -> None:
        """Look at a step that was done; all ranks call it with the same numbers.

        Raises:
            RunRefused: there were too many in a row.
        """
        scaler = self._scaler
        falling = scaler and scaler.dynamic and scaler.cur_scale > scaler.min_scale  # fp16 is finding its loss scale
        if math.isfinite(loss) and (falling or math.isfinite(grad_norm)):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        scaled = f" at a loss scale of {scaler.cur_scale:g}" if scaler and scaler.cur_scale != 1 else ""
        what = f"step {step}: the loss is {loss:g}, the gradient's norm {grad_norm:g}{scaled}"
        if self.in_a_row < self.limit:
            self.log.print(f"warning: {what}; the step changes nothing")
            return
        times = f"{self.in_a_row} steps in a row" if self.in_a_row > 1 else "one step"
        raise RunRefused(f"{what}; ended after {times} (max_bad_steps); {self._cause(loader, batch)}")

    def _cause(self, loader: Loader, batch: GlobalBatch) -> str:
        numbers = sorted(batch.samples)
        bad = []
        with paused():
            for number in tqdm(numbers, "looking for the records", disable=self.log.quiet or None, leave=False):
                if not math.isfinite(self.trainer.eval_loss(loader, loader.batch_of([number]))):
                    bad.append(number)
                self.mark("a sample alone")
        if not bad:
            return "each of its records alone gives a finite loss: expected a lower learning rate or fp32"
        if len(bad) == len(numbers):
            return "so does each of its records alone: the weights are spoilt, or the learning rate is too high"
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        return f"no finite loss from {', '.join(map(self.origin, bad[:SHOWN]))}{more}"
