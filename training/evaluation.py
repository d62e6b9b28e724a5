"""Measure the loss on held-out records: overall and for each type of record.

Samples are evaluated in global batches like those of training, with dropout off and without auxiliary losses. Batches
are weighted by their trained tokens, or by what else the objective's loss is a mean over, so the result is the mean
over all, whatever the batch size. The order and the random generators of training do not change. Cost: about a third of
a training step on as many samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product

from tqdm import tqdm

from common.terminal import paused
from data.loader import GlobalBatch, Loader
from training.config.keys import TrainConfig
from training.engine.trainer import Trainer


class Evaluation:
    """The evaluation set of a run.

    Args:
        loaders: one for each type of record in the same data, the same on all ranks.
        steps_per_epoch: of the training; 0 if unknown.
        active: whether this rank shows progress.
        records: fingerprint of the records; empty for other samples, which have no perplexity.
    """

    def __init__(
        self,
        loaders: Mapping[str, Loader],
        config: TrainConfig,
        steps_per_epoch: int,
        active: bool,
        records: str = "",
    ) -> None:
        self.records = records
        self._interval = config.eval_interval or steps_per_epoch
        self._at_start = config.eval_at_start
        self._active = active
        self.loaders = loaders
        self._has_perplexity = bool(records) and config.objective.has_perplexity
        self.best_by = config.objective.best_by
        self.before: Callable[[Trainer, Loader, GlobalBatch], None] | None = None  # gets all batches, then they count
        for loader in loaders.values():
            loader.evaluates = True

    def due(self, step: int, last: bool) -> bool:
        """Return whether to evaluate after `step`; 0 means before the first one."""
        if step == 0:
            return self._at_start
        return last or (self._interval > 0 and step % self._interval == 0)

    def run(
        self, trainer: Trainer, mark: Callable[[str], None], stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Return `eval_loss`, for records also `eval_perplexity`, and for several types `eval_loss/<type>`.

        Args:
            mark: reports progress to the failure detector.
            stopping: called after each batch; if it returns True, on all ranks alike, the result is None.
        """
        losses, weights = dict.fromkeys(self.loaders.values(), 0.0), dict.fromkeys(self.loaders.values(), 0)

        def add(trainer: Trainer, loader: Loader, batch: GlobalBatch) -> None:
            weight = loader.collation.weight(batch)
            losses[loader] += trainer.eval_loss(loader, batch) * weight
            weights[loader] += weight

        passes = [self.before, add] if self.before else [add]
        batches = sum(loader.steps_per_epoch for loader in losses) * len(passes)
        hidden = None if self._active else True  # None: only on a terminal
        with paused(), tqdm(total=batches, desc="evaluation", disable=hidden, leave=False) as bar:
            for work, loader in product(passes, losses):
                for position in range(loader.steps_per_epoch):
                    work(trainer, loader, loader.batch(position))
                    bar.update()
                    mark("a batch of an evaluation")
                    if stopping():
                        return None

        mean = sum(losses.values()) / sum(weights.values())
        found = {"eval_loss": mean}
        if self._has_perplexity:
            found["eval_perplexity"] = math.exp(min(mean, 700.0))
        if len(losses) > 1:
            found |= {f"eval_loss/{kind}": losses[its] / weights[its] for kind, its in self.loaders.items()}
        return found
