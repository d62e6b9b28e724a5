"""Write the losses of preferences and classes out with torch, for one sample at a time.

A mistake in `models.preference` must not affect the reference of a proof too, so nothing of it is used here. A sample
is one document, or two, the better answer first (`data.sample_set`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data.sample_set import Sample

ANSWERS = ("logps/chosen", "logps/rejected")  # in metrics.jsonl


def documents(sample: Sample) -> list[Sample]:
    """Split a sample into its documents."""
    first = sample.get("first", 0) or len(sample["input_ids"])
    halves = slice(0, first), slice(first, None)
    made: list[Sample] = [{"input_ids": sample["input_ids"][half], "labels": sample["labels"][half]} for half in halves]
    return [each for each in made if len(each["input_ids"])]


def record(sample: Sample, classes: bool) -> dict[str, Any]:
    """Write a sample as a record in a file of token ids, with the number of its class where there are some."""
    value, parts = sample.get("value", 0.0), [dict(each) for each in documents(sample)]
    if len(parts) == 2:
        return {"chosen": parts[0], "rejected": parts[1], "margin": value}
    return parts[0] | ({"label": int(value)} if classes else {})


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


def score_loss(scores: Tensor, value: float, center_weight: float) -> Tensor:
    """Compute the loss of what a model that scores says of one document, [1, classes], or of two, [2, 1].

    Args:
        value: the number of the class, or the margin.
    """
    if len(scores) == 1:
        return F.cross_entropy(scores, torch.tensor([int(value)]))
    better, worse = scores[:, 0]
    return F.softplus(worse + value - better) + (better + worse).square() * center_weight
