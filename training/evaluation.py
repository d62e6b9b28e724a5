"""The loss on records that are not trained on: overall and for each type of record.

Each type's samples pass through the model in global batches like those of training, with dropout off and without the
further terms of the loss. A batch's mean counts by its supervised tokens, so the result is the mean over all of them,
also where the set does not divide into batches. Nothing of the training changes: not its order, not its generators.
Cost: a forward pass for each sample, about a third of a training step on as many.
"""

from __future__ import annotations

import math

from tqdm import tqdm

from data.tokenized.dataset import Dataset
from training.config.keys import TrainConfig
from training.data_setup import build_loader
from training.distributed.rank_monitor import RankMonitor
from training.engine.trainer import Trainer


class Evaluation:
    """The evaluation set of a run.

    Attributes:
        records: the fingerprint of its records.

    Args:
        dataset: the records; all ranks hold the same.
        replicas: data-parallel size.
        steps_per_epoch: of the training; 0 where nobody knows.
        active: whether this rank shows progress.

    Raises:
        ConfigError: `pack_len` is shorter than a sample.
    """

    def __init__(
        self, dataset: Dataset, config: TrainConfig, replicas: int, steps_per_epoch: int, active: bool
    ) -> None:
        self.dataset, self.records = dataset, dataset.fingerprint()
        self._interval = config.eval_interval or steps_per_epoch
        self._at_start = config.eval_at_start
        self._active = active
        self._loaders = {
            kind: build_loader(
                dataset, config, replicas, numbers=[number for number, its in enumerate(dataset.types) if its == kind]
            )
            for kind in sorted(set(dataset.types))
        }

    def due(self, step: int, last: bool) -> bool:
        """Whether to evaluate after `step`, 0 before the first one; always after the last one."""
        if step == 0:
            return self._at_start
        return last or (self._interval > 0 and step % self._interval == 0)

    def run(self, trainer: Trainer, monitor: RankMonitor) -> dict[str, float]:
        """`eval_loss`, `eval_perplexity` and, where there are several types, `eval_loss/<type>`."""
        losses, tokens = dict.fromkeys(self._loaders, 0.0), dict.fromkeys(self._loaders, 0)
        batches = sum(loader.steps_per_epoch for loader in self._loaders.values())
        with tqdm(total=batches, desc="evaluation", disable=None if self._active else True, leave=False) as bar:
            for kind, loader in self._loaders.items():
                for position in range(loader.steps_per_epoch):
                    batch = loader.batch(position)
                    losses[kind] += trainer.eval_loss(loader, batch) * batch.supervised
                    tokens[kind] += batch.supervised
                    bar.update()
                    monitor.mark("a batch of an evaluation")
        mean = sum(losses.values()) / sum(tokens.values())
        found = {"eval_loss": mean, "eval_perplexity": math.exp(min(mean, 700.0))}
        if len(losses) > 1:
            found |= {f"eval_loss/{kind}": losses[kind] / tokens[kind] for kind in losses}
        return found
