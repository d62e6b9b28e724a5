"""The losses of models that give a text numbers (`models.scores`): of rewards for pairs, and of classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from models.layers import Activations, Head
from models.loss.interface import MeasuredLoss
from models.loss.micro_batch import weighted_router_loss
from models.parallel.groups import summed
from options.preference.losses import REWARD_MEASURES, with_margins

ACCURACY = "accuracy"
CLASS_MEASURES = (ACCURACY,)


class ScoreLoss(MeasuredLoss):
    """The loss of a micro-batch for a model that scores (`models.scores`): of rewards for pairs, or of classes.

    A reward model learns that the better answer scores higher (Bradley-Terry, arXiv:2203.02155, equation 1), by the
    pair's margin. Both have the definitions of trl and transformers.

    Args:
        pairs: whether documents come in pairs; else each has a class.
        center_weight: weight of the squared sum of a pair's rewards, which keeps them around 0 (arXiv:2312.09244).
        router_loss_weight: as for `models.loss.micro_batch.micro_batch_loss`.
    """

    def __init__(self, pairs: bool, center_weight: float = 0.0, router_loss_weight: float = 0.0) -> None:
        self._pairs, self._center_weight, self._router_loss_weight = pairs, center_weight, router_loss_weight
        self.measures = REWARD_MEASURES if pairs else CLASS_MEASURES

    def __call__(self, head: Head, activations: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        """Compute a micro-batch's part of the global loss; `labels` as `JudgedCollation` sends them.

        Of the facts the second column counts: the margin of a pair, or the number of a document's class.
        """
        _, scale, share, documents, facts, *_ = labels
        scores = self._scores(head, activations[0].flatten(0, 1), documents.flatten(), len(facts))
        if self._pairs:
            rewards, margins = scores.view(-1, 2), facts[::2, 1]
            losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margins)
            losses = losses + self._center_weight * rewards.sum(dim=1).square()
            counted = torch.cat([rewards[:, :1] > rewards[:, 1:], rewards], dim=1)
        else:
            classes = facts[:, 1].long()
            losses = F.cross_entropy(scores, classes, reduction="none")
            counted = (scores.argmax(dim=1) == classes)[:, None]
        self.count(counted)
        loss = losses.sum() * scale
        if head.rows.size > 1:  # each of them has the whole loss, and gradients of its own tokens
            loss = loss - loss.detach() * (1 - 1 / head.rows.size)
        return loss + weighted_router_loss(head, activations, share, self._router_loss_weight)

    def means(self, found: dict[str, float]) -> dict[str, float]:
        return with_margins(found)

    def _scores(self, head: Head, hidden: Tensor, documents: Tensor, count: int) -> Tensor:
        """Project the last token of each document: [tokens, H] -> [documents, numbers], in fp32."""
        tokens = torch.arange(len(documents), device=hidden.device)
        of_document = documents == torch.arange(count, device=hidden.device)[:, None]
        last = torch.where(of_document, tokens, -1).amax(dim=1) if count else tokens[:0]
        if head.rows.size == 1:
            return head.project(hidden[last]).float()
        owner = torch.where(last >= 0, head.rows.rank, -1)
        if count:
            distributed.all_reduce(owner, distributed.ReduceOp.MAX, head.rows.group)
        own = (owner == head.rows.rank)[:, None]
        return summed(head.project(hidden[last.clamp(min=0)]).float() * own, head.rows)
