"""The training loss: a sum over supervised tokens, made a global mean by the caller's scale.

The loss of a step is the mean cross-entropy over the supervised tokens of the GLOBAL batch, however that is cut into
micro-batches and spread over replicas. No stage sees that batch, so a micro-batch contributes its sum times a scale
that the data loader, which does see it, sends along. Only supervised positions are projected to the vocabulary, chunk
by chunk (`models.loss.lean`): on instruction data that saves most of the head's work.

A user's own loss may take the place of the cross-entropy: of each token by itself, so that no cut of a batch changes
it. It costs the head's product twice, as logits are made again in the backward pass, and autograd's copies of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.layers import Activations, Head
from models.loss.interface import shifted, supervised_positions
from models.loss.lean import chunk_tokens, linear_cross_entropy
from models.router import router_loss, top_k

ALIGNED = 8  # columns of a matrix: products of 16-bit numbers are fast for whole multiples

# A user's loss: logits [T, V] in fp32 and what each token should have been, [T] -> the loss of each, [T].
TokenLoss = Callable[[Tensor, Tensor], Tensor]


def token_loss(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    z_loss_weight: float = 0.0,
    supervised: Tensor | None = None,
    own: TokenLoss | None = None,
) -> Tensor:
    """Sum the loss over the supervised tokens of a micro-batch, in fp32.

    Args:
        hidden: normalised hidden states [B, S, H].
        labels: [B, S], aligned with the inputs (not shifted); `IGNORED` where there is no loss. Of a part of a row they
            are one more, as its last token predicts the next part's first.
        z_loss_weight: weight of (max log-softmax)^2, summed as the cross-entropy is. A relative of the max-z loss of
            Baichuan 2 (arXiv:2309.10305), which squares the largest logit itself.
        supervised: the `supervised_positions`, found here where absent.
        own: counts in place of the cross-entropy and the z-loss.

    Returns:
        A scalar fp32 tensor; 0 with a gradient of 0 where nothing is supervised.
    """
    rows, targets = trained_rows(hidden, labels, supervised)
    if own:
        return _own_loss(own, rows, targets, head)
    rows, projection = for_projection(rows, head)
    options = head.cap, z_loss_weight, head.ranks, head.words
    return linear_cross_entropy(rows, projection, targets, *options, summed=head.gradient_sum)


def trained_rows(hidden: Tensor, labels: Tensor, supervised: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pick the hidden states that predict a supervised token, [T, H], and what each has to predict, [T].

    Arguments as of `token_loss`.
    """
    if supervised is None:
        supervised = supervised_positions(labels, hidden.shape[1])
    rows = hidden.flatten(0, 1).index_select(0, supervised)
    return rows, shifted(labels, hidden.shape[1]).index_select(0, supervised)


def for_projection(rows: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Get hidden states [T, H] and a projection [V, H] whose product are the logits, but for a cap."""
    rows, projection = head.scaled(rows), head.projection()
    if (bias := head.lm_head.bias) is not None:
        rows, projection = _with_bias(rows, projection, bias)
    return rows, projection


def _own_loss(own: TokenLoss, hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Sum a user's loss over tokens [T, H], whose logits are widened to fp32."""

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return own(head.project(hidden).float(), targets).sum()

    size = chunk_tokens(head.words or len(head.projection()), hidden.is_cpu)
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.stack([checkpoint(part, *each, use_reentrant=False) for each in parts]).sum()


def _with_bias(rows: Tensor, projection: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Append the bias [V] as a column of the projection, padded with zeros.

    Costs a copy of the projection. Few families have such a bias (Phi).
    """
    more = (0, ALIGNED - 1)
    rows = torch.cat([rows, F.pad(torch.ones_like(rows[:, :1]), more)], dim=1)
    return rows, torch.cat([projection, F.pad(bias[:, None], more)], dim=1)


def micro_batch_loss(
    head: Head,
    activations: Activations,
    labels: tuple[Tensor, ...],
    z_loss_weight: float = 0.0,
    router_loss_weight: float = 0.0,
    own: TokenLoss | None = None,
) -> Tensor:
    """Compute a micro-batch's part of the global loss, in fp32.

    It is the token sum times `scale`, plus the router loss, which is no sum over tokens, times the micro-batch's
    `share` of the global batch's tokens. A model in evaluation mode has the cross-entropy only.

    Args:
        activations: what the head gave: normalised hidden states [B, S, H], position ids, router sums.
        labels: labels [B, S], scale [], share [] and, where they are known, the `supervised_positions` [T].
        z_loss_weight, own: see `token_loss`.
        router_loss_weight: weight of the load-balancing loss of mixture-of-experts (`models.router`).
    """
    targets, scale, share, *known = labels
    z_loss_weight, own = (z_loss_weight, own) if head.training else (0.0, None)
    loss = token_loss(activations[0], targets, head, z_loss_weight, known[0] if known else None, own) * scale
    return loss + weighted_router_loss(head, activations, share, router_loss_weight)


def weighted_router_loss(head: Head, activations: Activations, share: Tensor, weight: float) -> Tensor | float:
    """Compute the router loss of a micro-batch times its weight; 0 without one; arguments as of `micro_batch_loss`."""
    if not (weight and head.training):
        return 0.0
    return weight * router_loss(head.summed(activations[2]), top_k(head.config)) * share
