"""The losses of pairs written out with torch, for one pair at a time: the reference of a proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data.sample_set import Sample, documents
from training.objective import Formula, Parts, log_probabilities, record_of

if TYPE_CHECKING:
    from options.preference.keys import PreferenceSection

SUMMED = 20  # per beta, by which sums over answers feel their rounding: in bf16 one rounding was seen for 0.1


def record_of_pair(sample: Sample) -> dict[str, Any]:
    """Write a pair as a record in a file of token ids."""
    better, worse = map(record_of, documents(sample))
    return {"chosen": better, "rejected": worse, "margin": sample.get("value", 0.0)}


class PairsFormula(Formula):
    """A function of the log-probabilities of both answers, and the cross-entropy of the better one."""

    noted = ("logps/chosen", "logps/rejected")
    about = "log-probabilities of answers"

    def __init__(self, section: PreferenceSection) -> None:
        self._objective, self.begins_alone = section.objective, section.needs_reference
        self.widening = 1.0 if section.length_normalised else 1.0 + SUMMED * section.beta

    def parts(self, sample: Sample, found: Sequence[tuple[Tensor, Tensor]], begin: Tensor, auxiliary: bool) -> Parts:
        sums = torch.stack([each.sum() for each in log_probabilities(found)])
        lengths = torch.tensor([int((wanted >= 0).sum()) for _, wanted in found])
        reference = begin if self.begins_alone else torch.zeros(2)
        loss = pair_loss(self._objective, sums, reference, lengths)
        return Parts(loss, -self._objective["sft_weight"] * sums[0], sums)

    def record(self, sample: Sample) -> dict[str, Any]:
        return record_of_pair(sample)


def pair_loss(objective: dict[str, Any], sums: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """Compute the loss of a pair, without the cross-entropy of the better answer.

    Args:
        objective: beta and the like (docs/preferences.md).
        sums, reference, lengths: log-probabilities of both answers, those of the reference, trained tokens, [2] each.
    """
    kind, beta, smoothing = objective["loss"], objective["beta"], objective["label_smoothing"]
    scores = (sums - reference) / (lengths if objective["length_normalised"] else 1)
    if kind == "ipo":
        return (scores[0] - scores[1] - 0.5 / beta).square()
    if kind == "orpo":
        odds = torch.special.logit(scores.exp())
        return F.softplus(odds[1] - odds[0]) * beta
    margin = (scores[0] - scores[1]) * beta - objective["gamma"]
    return F.softplus(-margin) * (1 - smoothing) + F.softplus(margin) * smoothing
