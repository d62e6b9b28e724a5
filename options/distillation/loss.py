"""Distillation: the loss of a student, and what a teacher finds before the student is there.

A teacher's forward pass over all samples keeps the log-probabilities of each trained token's `top_k` most probable
words (`TeacherWords`); in every step the student's loss compares with them (`DistillationLoss`, by the formulas of
`options.distillation.soft_targets`). They come with the labels, in the order of
`models.loss.interface.supervised_positions`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers import Activations, Head
from models.loss.interface import MeasuredLoss, supervised_positions
from models.loss.lean import chunk_tokens, fp32_logits, linear_cross_entropy
from models.loss.micro_batch import for_projection, micro_batch_loss, trained_rows, weighted_router_loss
from models.parallel.groups import gathered
from options.distillation.soft_targets import SoftTargets


class DistillationLoss(MeasuredLoss):
    """The loss of a micro-batch with soft targets, in the place of `models.loss.micro_batch.micro_batch_loss`.

    Records to evaluate on, of which the teacher is not asked, have the cross-entropy only.

    Args:
        weight, temperature: as in `options.distillation.soft_targets`.
        z_loss_weight, router_loss_weight: as for `models.loss.micro_batch.micro_batch_loss`.

    Attributes:
        measures: means over the trained tokens that `take` has the sums of.
    """

    measures = ("cross_entropy", "kl")

    def __init__(
        self, weight: float, temperature: float, z_loss_weight: float = 0.0, router_loss_weight: float = 0.0
    ) -> None:
        self._mix = weight, temperature
        self._z_loss_weight, self._router_loss_weight = z_loss_weight, router_loss_weight
        self._found: list[Tensor] = []
        self._tokens = 0

    def __call__(self, head: Head, activations: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        """Compute a micro-batch's part of the global loss, in fp32.

        Args:
            activations: as for `models.loss.micro_batch.micro_batch_loss`.
            labels: labels [B, S], scale [], share [] as there; to train on, the teacher's words and log-probabilities
                [T, 2, k], see `SoftTargets.packed`; where they are known, the `supervised_positions` [T].
        """
        ids, scale, share, *more = labels
        if not head.training and not any(each.dim() == 3 for each in more):
            return micro_batch_loss(head, activations, labels)
        packed, *known = more
        hidden, targets = trained_rows(activations[0], ids, known[0] if known else None)
        soft = SoftTargets.packed(packed, *self._mix)
        assert len(soft.words) == len(targets), "as many soft targets as trained tokens"
        hidden, projection = for_projection(hidden, head)
        options = head.cap, self._z_loss_weight, head.ranks, head.words
        loss = linear_cross_entropy(hidden, projection, targets, *options, mixed=soft, summed=head.gradient_sum) * scale
        self._found += soft.found
        self._tokens += len(targets)
        return loss + weighted_router_loss(head, activations, share, self._router_loss_weight)

    def take(self) -> Tensor:
        """Return and reset the number of trained tokens and the sums of `measures` over them, [3] fp64."""
        found, tokens, self._found, self._tokens = self._found, self._tokens, [], 0
        sums = torch.stack(found).double().sum(dim=0).cpu() if found else torch.zeros(2, dtype=torch.float64)
        return torch.cat([sums.new_tensor([tokens]), sums])


class TeacherWords:
    """Find each trained token's most probable words, in the place of a loss.

    Args:
        top_k: how many of them.
        limit: only words below this number count.

    """

    def __init__(self, top_k: int, limit: int) -> None:
        self._top_k, self._limit = top_k, limit
        self._recorded: list[tuple[Tensor, Tensor]] = []

    def take(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return and reset what was found.

        Returns:
            the numbers that came with the labels [T] int64, and the words and the bits of their log-probabilities,
            [T, 2, k] int32.
        """
        found, self._recorded = self._recorded, []
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        if not found:
            return nothing, nothing.new_empty(0, 2, self._top_k, dtype=torch.int32)
        numbers, words = zip(*found, strict=True)
        return torch.cat(numbers), torch.cat(words)

    @torch.no_grad()
    def __call__(self, head: Head, activations: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        """Record a micro-batch; return 0. Labels as for `DistillationLoss`, with the tokens' numbers [T, 1]."""
        ids, _, _, numbers, *known = labels
        positions = known[0] if known else supervised_positions(ids, activations[0].shape[1])
        rows, projection = for_projection(trained_rows(activations[0], ids, positions)[0], head)
        size = chunk_tokens(head.words or len(projection), rows.is_cpu)
        found = [self._best(part, projection, head) for part in rows.split(size)]
        self._recorded.append((numbers.squeeze(1), torch.cat(found)))
        return torch.zeros((), device=rows.device)

    def _best(self, rows: Tensor, projection: Tensor, head: Head) -> Tensor:
        """Find the words of tokens [T, H]; with tensor parallelism every rank gets the logits of all words."""
        logits = fp32_logits(rows, projection)
        if head.ranks.size > 1:
            logits = gathered(logits, head.ranks, head.words)
        if head.cap is not None:
            logits = logits.div_(head.cap).tanh_().mul_(head.cap)
        log_probabilities, words = logits.log_softmax(dim=-1)[:, : self._limit].topk(self._top_k)
        return torch.stack([words.int(), log_probabilities.contiguous().view(torch.int32)], dim=1)
