"""The training loss: a sum over supervised tokens, made a global mean by the caller's scale.

Contract 4: the loss of a step is the mean cross-entropy over the supervised tokens of the GLOBAL batch. No stage sees
that batch, so a micro-batch contributes its sum times a scale that the data loader, which does see it, sends along.
Only supervised positions are projected to the vocabulary: on instruction data that saves most of the head's work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import Head, Stream
from models.router import router_loss

IGNORED = -100  # the label of a token without loss, as in transformers and torch


def token_loss(
    hidden: Tensor, labels: Tensor, project: Callable[[Tensor], Tensor], z_loss_weight: float = 0.0
) -> Tensor:
    """The loss summed over the supervised tokens of one micro-batch, in fp32.

    Args:
        hidden: normalised hidden states [B, S, H].
        labels: [B, S], aligned with the inputs (not shifted); `IGNORED` where there is no loss.
        project: hidden states [T, H] -> logits [T, V].
        z_loss_weight: weight of (max log-softmax)^2, summed as the cross-entropy is. A relative of the max-z loss of
            Baichuan 2 (arXiv:2309.10305), which squares the largest logit itself.

    Returns:
        A scalar fp32 tensor; 0 with a gradient of 0 where nothing is supervised.
    """
    targets = labels[:, 1:]
    supervised = targets != IGNORED
    logits = project(hidden[:, :-1][supervised]).float()
    total = F.cross_entropy(logits, targets[supervised], reduction="sum")
    if z_loss_weight:
        largest = logits.amax(dim=-1) - torch.logsumexp(logits, dim=-1)
        total = total + z_loss_weight * largest.square().sum()
    return total


def micro_batch_loss(
    head: Head,
    stream: Stream,
    labels: tuple[Tensor, Tensor, Tensor],
    z_loss_weight: float = 0.0,
    router_loss_weight: float = 0.0,
) -> Tensor:
    """A micro-batch's part of the global batch's loss, in fp32; the parts of all micro-batches are averaged.

    It is the token sum times `scale`, plus the router loss, which is no sum over tokens, times the micro-batch's
    `share` of the global batch's tokens. A model in evaluation mode has the cross-entropy only.

    Args:
        head: projects hidden states to the vocabulary.
        stream: what the head gave: normalised hidden states [B, S, H], position ids, router sums.
        labels: labels [B, S], scale [] and share [].
        z_loss_weight: see `token_loss`.
        router_loss_weight: weight of the load-balancing loss of mixture-of-experts (`models.router`).
    """
    targets, scale, share = labels
    loss = token_loss(stream[0], targets, head.project, z_loss_weight if head.training else 0.0) * scale
    if router_loss_weight and head.training:
        loss = loss + router_loss_weight * router_loss(stream[2], head.config.num_experts_per_tok) * share
    return loss
