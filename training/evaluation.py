"""The loss on records that are not trained on: overall and for each type of record.

Each type's samples pass through the model in global batches like those of training, with dropout off and without the
further terms of the loss. A batch's mean counts by its supervised tokens, so the result is the mean over all of them,
also where the set does not divide into batches. Nothing of the training changes: not its order, not its generators.
Cost: a forward pass for each sample, about a third of a training step on as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tqdm import tqdm

from common.terminal import paused
from data.loader import Loader
from training.config.keys import TrainConfig
from training.engine.trainer import Trainer


class Evaluation:
    """The evaluation set of a run.

    Args:
        loaders: of the samples of each type; all ranks hold the same.
        steps_per_epoch: of the training; 0 where nobody knows.
        active: whether this rank shows progress.
        records: the fingerprint of the records; empty for other samples, which have no perplexity.
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
        self._loaders = loaders

    def due(self, step: int, last: bool) -> bool:
        """Whether to evaluate after `step`, 0 before the first one; always after the last one."""
        if step == 0:
            return self._at_start
        return last or (self._interval > 0 and step % self._interval == 0)

    def run(
        self, trainer: Trainer, mark: Callable[[str], None], stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """`eval_loss`; of records `eval_perplexity` too and, where there are several types, `eval_loss/<type>`.

        Args:
            mark: reports progress to the failure detector.
            stopping: called after each batch: whether to leave, the same on all ranks; the result is None then.
        """
        losses, tokens = dict.fromkeys(self._loaders, 0.0), dict.fromkeys(self._loaders, 0)
        batches = sum(loader.steps_per_epoch for loader in self._loaders.values())
        hidden = None if self._active else True  # None: only on a terminal
        with paused(), tqdm(total=batches, desc="evaluation", disable=hidden, leave=False) as bar:
            for kind, loader in self._loaders.items():
                for position in range(loader.steps_per_epoch):
                    batch = loader.batch(position)
                    losses[kind] += trainer.eval_loss(loader, batch) * batch.supervised
                    tokens[kind] += batch.supervised
                    bar.update()
                    mark("a batch of an evaluation")
                    if stopping():
                        return None
        mean = sum(losses.values()) / sum(tokens.values())
        found = {"eval_loss": mean} | ({"eval_perplexity": math.exp(min(mean, 700.0))} if self.records else {})
        if len(losses) > 1:
            found |= {f"eval_loss/{kind}": losses[kind] / tokens[kind] for kind in losses}
        return found
