"""Losses of preferences: functions of the log-probabilities of whole answers.

A sample is a pair of documents in one row, the better answer first, each behind the same prompt; or one document that
is marked as desirable or not. Every loss here is a function f of the documents' sums s_d, the log-probabilities of a
document's trained tokens. Its gradient is the sum of df/ds_d x ds_d/dw over documents, which is that of a cross-entropy
where each token of document d counts -df/ds_d times. So the lean cross-entropy (`models.loss.lean`) asks for a
coefficient a token once it knows the loss of each: there f is differentiated, a function of a few numbers. As a pair
never leaves its row, no coefficient depends on how a batch is cut into micro-batches and replicas.

The reference is the model as it was before training. Its sums come with the samples, made once
(`options.preference.reference`).

Cost: logits are computed again where a micro-batch has more than one chunk of them; memory as without preferences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import Activations, Head
from models.loss.interface import MeasuredLoss, supervised_positions
from models.loss.lean import linear_cross_entropy
from models.loss.micro_batch import for_projection, trained_rows, weighted_router_loss

# What is added up over pairs for the log, by trl's names.
RIGHT, MARGIN, UNPRINTED = "rewards/accuracies", "rewards/margins", ("rewards", "logps")
REWARD_MEASURES = (RIGHT, "rewards/chosen", "rewards/rejected")
MEASURES = (*REWARD_MEASURES, "logps/chosen", "logps/rejected", "logps/accuracies")
# Of desirable answers (chosen) and undesirable ones (rejected); each counts 0 in the sums of the other class.
UNPAIRED_MEASURES = ("desirable", "kl", *REWARD_MEASURES[1:], *MEASURES[3:5])


@dataclass(frozen=True)
class PairLoss:
    """One loss of a pair, or of an answer by itself.

    Attributes:
        loss: a name in `LOSSES`, or one of `UnpairedLoss`.
        beta: what differences of log-probabilities are multiplied with.
        label_smoothing: share of the pairs expected to be the wrong way round.
        gamma: margin to be exceeded, in the unit of beta times a difference.
        sft_weight: weight of the cross-entropy of the better answers, a mean over tokens.
        length_normalised: whether log-probabilities are those of a token, on average.
        desirable_weight, undesirable_weight: of the losses of such answers, where they come by themselves.
    """

    loss: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0
    sft_weight: float = 0.0
    length_normalised: bool = False
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def scores(self, sums: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
        """Compare log-probabilities with the reference's, all [pairs, 2]: better and worse answers."""
        found = sums - reference
        return found / lengths.clamp(min=1) if self.length_normalised else found


def _dpo(of: PairLoss, scores: Tensor) -> Tensor:
    """-log sigmoid of the margin, smoothed: DPO (arXiv:2305.18290, equations 3 and 7), SimPO (arXiv:2405.14734)."""
    margin = of.beta * (scores[:, 0] - scores[:, 1]) - of.gamma
    return -(1 - of.label_smoothing) * F.logsigmoid(margin) - of.label_smoothing * F.logsigmoid(-margin)


def _ipo(of: PairLoss, scores: Tensor) -> Tensor:
    """Return the squared distance of a difference from 1 / (2 beta) (arXiv:2310.12036, equation 17)."""
    return (scores[:, 0] - scores[:, 1] - 1 / (2 * of.beta)).square()


def _orpo(of: PairLoss, scores: Tensor) -> Tensor:
    """-log sigmoid of the log odds ratio, odds = p / (1 - p) (arXiv:2403.07691, equations 4 and 7), times beta."""
    # Below -1e-6, as log(1 - p) has no gradient at p = 1, which a sure answer reaches in fp32.
    odds = scores - torch.log(-torch.expm1(scores.clamp(max=-1e-6)))
    return -of.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


LOSSES: dict[str, Callable[[PairLoss, Tensor], Tensor]] = {
    "dpo": _dpo,
    "cdpo": _dpo,
    "simpo": _dpo,
    "ipo": _ipo,
    "orpo": _orpo,
}


class PreferenceLoss(MeasuredLoss):
    """The loss of a micro-batch of pairs, in the place of `models.loss.micro_batch.micro_batch_loss`.

    Args:
        objective: the loss of a pair.
        router_loss_weight: as there.

    Attributes:
        measures: what `take` has the sums of.
        recorded: the documents' sums [D] of each micro-batch since it was set to a list; then nothing else is computed.
    """

    def __init__(self, objective: PairLoss, router_loss_weight: float = 0.0) -> None:
        self._objective, self._router_loss_weight = objective, router_loss_weight
        self.recorded: list[Tensor] | None = None
        self.measures: tuple[str, ...] = MEASURES

    def __call__(self, head: Head, activations: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        """Compute a micro-batch's part of the global loss, in fp32.

        Args:
            activations: as for `models.loss.micro_batch.micro_batch_loss`.
            labels: labels [B, S], scale [], share [] as there, but that scale is for sums over pairs; the number of
                each token's document [B, S], -1 for padding; the documents' facts [D, 2], of which the first column
                is the reference's sum; the scale [] for sums over tokens of better answers; where they are known, the
                `supervised_positions` [T].
        """
        ids, scale, share, documents, facts, token_scale, *known = labels
        positions = known[0] if known else supervised_positions(ids, activations[0].shape[1])
        hidden, targets = trained_rows(activations[0], ids, positions)
        member = documents.flatten().index_select(0, positions)
        objective, value = self._objective, activations[0].new_zeros((), dtype=torch.float32)

        def weigh(each: Tensor) -> Tensor:
            """Compute the loss from the cross-entropy of each token, and its derivatives."""
            nonlocal value
            sums, lengths = self._by_document(head, each, member, len(facts))
            if self.recorded is not None:
                self.recorded.append(sums)
                return torch.zeros_like(each)
            with torch.enable_grad():
                leaf = sums.requires_grad_()
                losses, counted = self._judge(leaf, facts, lengths)
                slopes = torch.autograd.grad(losses.sum(), leaf)[0]
            self.count(counted)
            of_better = member % 2 == 0
            better = of_better * (objective.sft_weight * token_scale / scale)
            value = losses.sum().detach() / head.rows.size + (better * each).sum()
            return better - slopes[member]

        hidden, projection = for_projection(hidden, head)
        counted = linear_cross_entropy(hidden, projection, targets, head.cap, 0.0, head.ranks, head.words, weigh)
        loss = (value + counted - counted.detach()) * scale
        return loss + weighted_router_loss(head, activations, share, self._router_loss_weight)

    def means(self, found: dict[str, float]) -> dict[str, float]:
        """Add the margin between the rewards of better and worse answers, where both are known."""
        return with_margins(found)

    def _by_document(self, head: Head, each: Tensor, member: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Sum log-probabilities over the trained tokens of each document, and count these: [D] each."""
        # A product, as a GPU adds into shared places in any order.
        of_document = (member == torch.arange(count, device=member.device)[:, None]).float()
        both = torch.stack([-(of_document @ each), of_document.sum(dim=1)])
        sums, lengths = head.summed(both)
        return sums.clone(), lengths

    def _judge(self, sums: Tensor, facts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of each sample, [n], and its measures, from its documents' numbers."""
        pairs = [numbers.view(-1, 2) for numbers in (sums, facts[:, 0], lengths)]
        scores = self._objective.scores(*pairs)
        rewards = self._objective.beta * scores
        right, likelier = (each[:, :1] > each[:, 1:] for each in (rewards, pairs[0]))
        counted = torch.cat([right, rewards, pairs[0], likelier], dim=1)
        return LOSSES[self._objective.loss](self._objective, scores), counted


class UnpairedLoss(PreferenceLoss):
    """The loss of a micro-batch of answers that are each marked as desirable (1 in their second fact) or not (0).

    KTO (arXiv:2402.01306, equation 7) is 1 - sigmoid(beta x (s - r - kl)) of a desirable answer and 1 - sigmoid(beta x
    (kl - s + r)) of an undesirable one, each times its weight; r is the reference's sum and `kl` an estimate of the
    divergence from the reference. APO-zero (arXiv:2408.06266), as trl has it for single answers, is that without `kl`.

    Attributes:
        kl: what rewards are compared with; see `compare`.
    """

    def __init__(self, objective: PairLoss, router_loss_weight: float = 0.0) -> None:
        super().__init__(objective, router_loss_weight)
        self.kl, self.measures = 0.0, UNPAIRED_MEASURES
        self._gained, self._compared = 0.0, 0

    def compare(self, gained: float, answers: int) -> None:
        """Set `kl` to what answers to other prompts gained, on average over all since the last `take`, or to 0."""
        self._gained += gained
        self._compared += answers
        self.kl = max(self._gained / self._compared, 0.0)

    def take(self) -> Tensor:
        self.kl, self._gained, self._compared = 0.0, 0.0, 0
        return super().take()

    def means(self, found: dict[str, float]) -> dict[str, float]:
        """Take the means over the answers of a class, unless it has none."""
        share = found.pop("desirable")
        shares = {"chosen": share, "rejected": 1 - share, "kl": 1.0}
        known = {name: shares[name.rpartition("/")[2]] for name in found}
        return with_margins({name: value / known[name] for name, value in found.items() if known[name]})

    def _judge(self, sums: Tensor, facts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        of, good = self._objective, facts[:, 1] == 1
        ratios = sums - facts[:, 0]
        weights = torch.where(good, of.desirable_weight, of.undesirable_weight)
        losses = weights * torch.sigmoid(torch.where(good, -of.beta, of.beta) * (ratios - self.kl))
        each = torch.stack([of.beta * ratios, sums], dim=1)[:, :, None] * torch.stack([good, ~good], dim=1)[:, None]
        counted = torch.stack([good, torch.full_like(ratios, self.kl)], dim=1)
        return losses, torch.cat([counted, each.flatten(1)], dim=1)


def with_margins(found: dict[str, float]) -> dict[str, float]:
    """Add the margin between the rewards of better and worse answers, where both are known."""
    if {"rewards/chosen", "rewards/rejected"} <= found.keys():
        found[MARGIN] = found["rewards/chosen"] - found["rewards/rejected"]
    return found
