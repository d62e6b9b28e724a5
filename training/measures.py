"""What a loss counts besides, averaged over a step or an evaluation, for the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed

from models.loss.interface import MeasuredLoss
from training.callbacks import Callback

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.engine.trainer import Trainer
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics


class Measures(Callback):
    """Add the measures of each step; of each evaluation too, and with them its errors.

    Args:
        right: the measure that is the share of right answers, which an evaluation has as `eval_error`, 1 minus it.
    """

    def __init__(self, right: str = "") -> None:
        self._right = right

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        metrics.measures |= measures_of(run.trainer)

    def on_evaluation(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        found = measures_of(run.trainer)
        if self._right:
            metrics["eval_error"] = 1 - found[self._right]
        metrics |= {f"eval_{name}": value for name, value in found.items()}


def loss_of(trainer: Trainer) -> Any:
    """Return the loss of a trainer's model, as its objective made it."""
    return trainer.engine.module.micro_batch_loss


def measures_of(trainer: Trainer) -> dict[str, float]:
    """Average what a `MeasuredLoss` counted since the last call; all ranks call it together."""
    loss: MeasuredLoss = loss_of(trainer)
    totals = loss.take().to(trainer.engine.device)
    distributed.all_reduce(totals)  # ranks that share a row count it alike
    count, *sums = totals.tolist()
    return loss.means({name: value / count for name, value in zip(loss.measures, sums, strict=True)})
