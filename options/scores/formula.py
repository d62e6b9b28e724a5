"""The losses of scores written out with torch, for one sample at a time: the reference of a proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data.sample_set import Sample
from options.preference.formula import record_of_pair
from training.objective import Formula, Parts


class ScoresFormula(Formula):
    """A function of what the last token of each document gets: [1, classes], or [2, 1] of a pair.

    Args:
        center_weight: weight of the squared sum of a pair's rewards.
    """

    def __init__(self, center_weight: float = 0.0) -> None:
        self._center_weight = center_weight

    def parts(self, sample: Sample, found: Sequence[tuple[Tensor, Tensor]], begin: Tensor, auxiliary: bool) -> Parts:
        scores, none = torch.stack([numbers[-1] for numbers, _ in found]), torch.zeros(())
        return Parts(score_loss(scores, sample.get("value", 0.0), self._center_weight), none, torch.zeros(0))

    def compared_logits(self, logits: Tensor) -> Tensor:
        return logits[-1]


class RewardsFormula(ScoresFormula):
    """The scores of a better and a worse answer."""

    def record(self, sample: Sample) -> dict[str, Any]:
        return record_of_pair(sample)


class ClassesFormula(ScoresFormula):
    """The scores of all classes of a document."""

    def record(self, sample: Sample) -> dict[str, Any]:
        return super().record(sample) | {"label": int(sample.get("value", 0.0))}


def score_loss(scores: Tensor, value: float, center_weight: float) -> Tensor:
    """Compute the loss of what a model that scores says of one document, [1, classes], or of two, [2, 1].

    Args:
        value: the number of the class, or the margin.
    """
    if len(scores) == 1:
        return F.cross_entropy(scores, torch.tensor([int(value)]))
    better, worse = scores[:, 0]
    return F.softplus(worse + value - better) + (better + worse).square() * center_weight
