"""Soft targets of a distillation: what a teacher gives each token's most probable words.

With z the student's logits of a token, y its label, S the k words that the teacher finds most probable, l their
log-probabilities, w the `weight` and T the `temperature`:

    q    = softmax of l / T over S          what the teacher gives to other words counts as 0
    p    = softmax of z / T over all words
    loss = (1 - w) CE(softmax(z), y) + w T^2 KL(q || p),   KL(q || p) = sum over S of q (log q - log p)

(Hinton et al. 2015, arXiv:1503.02531, section 2; T^2 keeps the size of the gradients as T grows.) So the mass outside
of S is spread over S in proportion, and the student learns to give nothing to other words; with k the whole vocabulary
nothing is left out. As softmax forgets a constant, log-probabilities at temperature 1 serve every T.

The gradient by z is (1 - w) (softmax(z) - onehot(y)) + w T (p - q). Cost: at T = 1 one softmax serves both terms, else
there is another pass over the logits and a copy of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.parallel.groups import RankGroup, add_up


@dataclass
class SoftTargets:
    """Soft targets of some tokens.

    Attributes:
        words: [T, k] int64.
        shares: [T, k] fp32, q of each.
        found: [2] of each part of the tokens so far: sums of cross-entropy and divergence.
    """

    words: Tensor
    shares: Tensor
    weight: float
    temperature: float
    found: list[Tensor] = field(default_factory=list)

    @classmethod
    def packed(cls, numbers: Tensor, weight: float, temperature: float) -> SoftTargets:
        """Read [T, 2, k] int32: words, and the bits of their fp32 log-probabilities, as the teacher's file has them."""
        words, log_probabilities = numbers.unbind(1)
        shares = (log_probabilities.contiguous().view(torch.float32) / temperature).softmax(dim=-1)
        return cls(words.long(), shares, weight, temperature)

    @property
    def hard(self) -> float:
        """Return the weight of the label's cross-entropy."""
        return 1 - self.weight

    @property
    def plain(self) -> float:
        """Return the weight of the softmax at temperature 1 in the gradient."""
        return 1.0 if self.temperature == 1 else self.hard

    def part(self, rows: slice, logits: Tensor, own: slice, ranks: RankGroup) -> SoftPart:
        """Prepare some tokens; see `models.loss.lean.Mixed`."""
        return SoftPart(self, rows, logits, own, ranks)


class SoftPart:
    """Some of the tokens, whose logits are at hand.

    Args:
        rows: of the tokens.
        logits: [T, V] minus the largest of each token, or of this rank's words, `own`.
    """

    def __init__(self, targets: SoftTargets, rows: slice, logits: Tensor, own: slice, ranks: RankGroup) -> None:
        self._targets, temperature = targets, targets.temperature
        words, shares = targets.words[rows], targets.shares[rows]
        here = (words >= own.start) & (words < own.stop)
        self._words, self._shares = (words - own.start).masked_fill(~here, 0), shares * here
        likeness = (self._shares * logits.gather(-1, self._words)).sum(dim=-1, keepdim=True) / temperature
        self._softened = None if temperature == 1 else (logits / temperature).exp_()
        total = torch.ones_like(likeness) if self._softened is None else self._softened.sum(dim=-1, keepdim=True)
        if ranks.size > 1:
            likeness, total = add_up(torch.stack([likeness, total]), ranks)
        self._total = total
        self._lacks_total = torch.special.entr(shares).sum(dim=-1, keepdim=True) + likeness

    def loss(self, cross_entropy: Tensor, log_total: Tensor) -> Tensor:
        """Mix the loss of each token, all [T, 1]; `log_total` is the logarithm of its exponentials' sum."""
        divergence = (log_total if self._softened is None else self._total.log()) - self._lacks_total
        self._targets.found.append(torch.stack([cross_entropy.sum(), divergence.sum()]))
        weight, temperature = self._targets.weight, self._targets.temperature
        return self._targets.hard * cross_entropy + weight * temperature**2 * divergence

    def differentiate(self, slopes: Tensor) -> None:
        """Add to slopes [T, V] what the softmax at temperature 1 does not have."""
        factor = self._targets.weight * self._targets.temperature
        if self._softened is not None:
            slopes.add_(self._softened.mul_(factor / self._total))
        slopes.scatter_add_(-1, self._words, -factor * self._shares)
