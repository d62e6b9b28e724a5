"""Steps whose loss or gradient is not finite: left out, counted, and traced to the records that made them.

Such a step changes no weight (see `training.engine.pipeline` and `training.config.deepspeed_config`). A few in a row
end the run, which would learn nothing more. The samples of the last one then pass through the model one by one: those
that give no finite loss are named. Where all of them do, the weights are at fault, not a record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console
from tqdm import tqdm

from data.dataset import Dataset
from data.loader import GlobalBatch, Loader
from data.streaming.stream import Stream
from training.engine.trainer import Trainer
from training.errors import RunRefused

SHOWN = 20  # records


@dataclass
class BadSteps:
    """Counts bad steps in a row.

    Attributes:
        limit: how many end the run.
        fp16: an infinite gradient is an everyday event then, by which the loss scale is found.
        active: whether this rank shows progress.
    """

    limit: int
    fp16: bool
    dataset: Dataset | Stream
    log: Console
    active: bool
    in_a_row: int = 0

    def check(
        self, trainer: Trainer, loader: Loader, batch: GlobalBatch, step: int, loss: float, grad_norm: float
    ) -> None:
        """Look at a step that was done; all ranks call it with the same numbers.

        Raises:
            RunRefused: there were too many in a row.
        """
        if math.isfinite(loss) and (self.fp16 or math.isfinite(grad_norm)):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        what = f"step {step}: the loss is {loss:g}, the gradient's norm {grad_norm:g}"
        if self.in_a_row < self.limit:
            self.log.print(f"warning: {what}; the step changes nothing")
            return
        times = f"{self.in_a_row} steps in a row" if self.in_a_row > 1 else "one step"
        raise RunRefused(f"{what}; ended after {times} (max_bad_steps); {self._cause(trainer, loader, batch)}")

    def _cause(self, trainer: Trainer, loader: Loader, batch: GlobalBatch) -> str:
        numbers = sorted(batch.samples)
        bad = [
            number
            for number in tqdm(numbers, "looking for the records", disable=None if self.active else True, leave=False)
            if not math.isfinite(trainer.eval_loss(loader, loader.batch_of([number])))
        ]
        if not bad:
            return "each of its records alone gives a finite loss: expected a lower learning rate or fp32"
        if len(bad) == len(numbers):
            return "so does each of its records alone: the weights are spoilt, or the learning rate is too high"
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        return f"no finite loss from {', '.join(map(self.dataset.origin, bad[:SHOWN]))}{more}"
