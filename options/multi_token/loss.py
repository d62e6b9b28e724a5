"""The loss of a model with layers ahead: its own, and that of each layer's predictions (`models.ahead.layers`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from models.ahead.layers import LayerAhead
from models.layers import Activations, Head
from models.loss.interface import MeasuredLoss
from models.loss.lean import chunk_tokens, fp32_logits, linear_cross_entropy
from models.loss.micro_batch import for_projection, micro_batch_loss
from models.parallel.groups import gathered
from options.multi_token.collation import further

LOSS, TARGETS, RIGHT, JUDGED, AGREES = "loss", "targets", "right", "judged", "agrees"
COUNTED = (LOSS, TARGETS, RIGHT, JUDGED, AGREES)  # sums, of each depth


class AheadLoss(MeasuredLoss):
    """The loss of a micro-batch, in the place of `models.loss.micro_batch.micro_batch_loss`.

    Its value is the model's own loss; its gradients are those of that and of `weight` times the mean over depths of
    the cross-entropy of what each layer ahead predicts. An evaluation counts what is drafted right, too.

    Args:
        detach: whether the layers ahead alone learn from their loss.
        only: whether nothing else learns.
        z_loss_weight, router_loss_weight: as for `models.loss.micro_batch.micro_batch_loss`.

    Attributes:
        embed: makes embeddings of token ids, on the last stage; set when all weights are there.
        sends_back: whether the stage before waits for a gradient, also where nothing learns from it.
    """

    embed: Callable[[Tensor], Tensor]
    sends_back = True

    def __init__(
        self,
        weight: float,
        detach: bool,
        only: bool,
        z_loss_weight: float = 0.0,
        router_loss_weight: float = 0.0,
    ) -> None:
        self.measures = ()
        self._weight, self._detach, self._only = weight, detach, only
        self._options: dict[str, Any] = {"z_loss_weight": z_loss_weight, "router_loss_weight": router_loss_weight}

    def expect(self, depth: int) -> None:
        """Set how many layers ahead there are, on every rank."""
        self.measures = tuple(f"{name}_{k}" for k, name in product(range(1, depth + 1), COUNTED))

    def __call__(self, head: Head, activations: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        """Compute a micro-batch's part of the global loss; `labels` as `AheadCollation` sends them."""
        depth = len(self.measures) // len(COUNTED)
        (targets, scale, share, ids), found = labels[:4], labels[4 : 4 + 2 * depth]
        scales, *known = labels[4 + 2 * depth :]
        *normalised, before_norm = activations
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._only):
            loss = micro_batch_loss(head, tuple(normalised), (targets, scale, share, *known), **self._options)

        ahead, counted = loss.new_zeros(()), list[Tensor]()
        assert head.ahead is not None
        hidden = self._left_alone(normalised[0] if head.ahead[0].norm else before_norm)
        for k, layer in enumerate(head.ahead, start=1):
            assert isinstance(layer, LayerAhead)
            embedded = self._left_alone(self.embed(_own(head, further(ids, k))))
            hidden = layer(embedded, hidden, normalised[1])
            places, words = found[2 * k - 2], found[2 * k - 1]
            rows = self._for_head(head, layer, hidden).flatten(0, 1).index_select(0, places)

            sum_of_depth = self._cross_entropy(head, rows, words)
            ahead = ahead + sum_of_depth * scales[k - 1] / len(head.ahead)
            judged = [0, 0, 0] if head.training else judge(head, rows, words, normalised[0].flatten(0, 1), places + k)
            numbers = loss.new_tensor([len(words), *judged], dtype=torch.float64)
            counted.append(torch.cat([sum_of_depth.detach().double()[None], numbers]))

        self.count(torch.cat(counted)[None])
        if not head.training:
            return loss
        if self._only and self.sends_back:
            loss = loss + 0.0 * normalised[0].sum()
        ahead = self._weight * ahead
        return loss + (ahead - ahead.detach())

    def means(self, found: dict[str, float]) -> dict[str, float]:
        """Make `mtp_loss` of the sums, and of each depth the shares of drafts that are right and that agree."""
        depths = range(1, 1 + len(self.measures) // len(COUNTED))
        trained = [k for k in depths if found[f"{TARGETS}_{k}"]]
        losses = {f"mtp_loss_{k}": found[f"{LOSS}_{k}"] / found[f"{TARGETS}_{k}"] for k in trained}
        made = {"mtp_loss": sum(losses.values()) / max(len(losses), 1)}
        if len(depths) > 1:
            made |= losses
        for k in trained:
            if judged := found[f"{JUDGED}_{k}"]:
                made[f"draft_{k}_right"] = found[f"{RIGHT}_{k}"] / found[f"{TARGETS}_{k}"]
                made[f"draft_{k}_agrees"] = found[f"{AGREES}_{k}"] / judged
        return made

    def _left_alone(self, tensor: Tensor) -> Tensor:
        """Take what is the model's own out of the backward pass, unless it learns too."""
        return tensor.detach() if self._detach else tensor

    def _for_head(self, head: Head, layer: LayerAhead, hidden: Tensor) -> Tensor:
        """Return what the head gets: with a norm of the layer's own it is there already."""
        if layer.norm is not None:
            return hidden
        weights = {name: self._left_alone(weight) for name, weight in head.norm.named_parameters()}
        behind: Tensor = functional_call(head.norm, weights, (hidden,))
        return behind

    def _cross_entropy(self, head: Head, rows: Tensor, words: Tensor) -> Tensor:
        rows, projection = for_projection(rows, head)
        projection = self._left_alone(projection)
        return linear_cross_entropy(rows, projection, words, head.cap, 0.0, head.ranks, head.words)


def _own(head: Head, rows: Tensor) -> Tensor:
    """Take this rank's columns of whole rows [B, S]."""
    return rows if head.rows.size == 1 else rows[:, head.rows.part(rows.shape[1])]


def judge(head: Head, rows: Tensor, words: Tensor, hidden: Tensor, places: Tensor) -> list[int]:
    """Count the drafts that are right, those of which the model's own choice is known, and those that are it.

    Args:
        rows: [T, H] of a layer ahead, as the head gets them.
        words: [T], what they should predict.
        hidden: [B * S, H] of the model itself.
        places: [T], whose predictions of the model itself are of the same words. With sequence parallelism the last
            ones of a part lie with the next rank.
    """
    drafted, known = greedy(head, rows), places < len(hidden)
    own = greedy(head, hidden.index_select(0, places[known]))
    return [int((drafted == words).sum()), int(known.sum()), int((drafted[known] == own).sum())]


@torch.no_grad()
def greedy(head: Head, rows: Tensor) -> Tensor:
    """Choose the most probable word after each hidden state [T, H]; with tensor parallelism every rank finds it."""
    rows, projection = for_projection(rows, head)
    chosen = [rows.new_empty(0, dtype=torch.int64)]
    for part in rows.split(chunk_tokens(head.words or len(projection), rows.is_cpu)):
        logits = fp32_logits(part, projection)
        if head.ranks.size > 1:
            logits = gathered(logits, head.ranks, head.words)
        chosen.append(logits.argmax(dim=-1))
    return torch.cat(chosen)
