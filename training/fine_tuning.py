"""Fine-tuning on tokens: the objective of a config that names no other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from data.sample_set import Sample
from models.loss.interface import MicroBatchLoss
from models.loss.micro_batch import micro_batch_loss
from training.objective import Formula, Objective, Parts, log_probabilities


class FineTuning(Objective):
    """Learn to say what the records say: the mean cross-entropy of all trained tokens."""

    has_perplexity = True
    sees = True
    by_token = True

    def loss(self, router_loss_weight: float) -> MicroBatchLoss:
        z_loss_weight = self.config.aux_max_z_loss.weight
        return partial(micro_batch_loss, z_loss_weight=z_loss_weight, router_loss_weight=router_loss_weight)

    def formula(self) -> Formula:
        return WordsFormula(self.config.aux_max_z_loss.weight)


class WordsFormula(Formula):
    """torch's cross-entropy over all logits, and the z-loss: weight x (max log-softmax)^2 of each trained token."""

    def __init__(self, z_loss_weight: float) -> None:
        self._z_loss_weight = z_loss_weight

    def parts(self, sample: Sample, found: Sequence[tuple[Tensor, Tensor]], begin: Tensor, auxiliary: bool) -> Parts:
        ((logits, wanted),), (said,) = found, log_probabilities(found)
        trained = wanted >= 0
        largest = torch.log_softmax(logits[:-1][trained], dim=-1).amax(dim=-1)
        z_loss = self._z_loss_weight * largest.square().sum() if auxiliary else torch.zeros(())
        return Parts(torch.zeros(()), z_loss - said.sum(), torch.zeros(0))
