"""Shows that the training loss is the shifted cross-entropy over the supervised tokens, with the z-loss on top."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models.loss.micro_batch
from models.loss.interface import IGNORED
from models.loss.lean import linear_cross_entropy
from models.loss.micro_batch import micro_batch_loss, token_loss
from tests.models.loss.heads import Bare

ROWS, LENGTH, WIDTH, WORDS = 3, 7, 8, 11


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.fixture
def head() -> Tensor:
    return torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture
def labels() -> Tensor:
    """Some tokens without loss, among them the whole last row but its first token, which nothing predicts."""
    labels = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    labels[0, :3] = labels[1, 4] = IGNORED
    labels[2, 1:] = IGNORED
    return labels


def written_out(hidden: Tensor, labels: Tensor, head: Tensor, weight: float) -> Tensor:
    """The definition, token by token."""
    total = torch.zeros(())
    for row in range(ROWS):
        for place in range(1, LENGTH):
            if labels[row, place] != IGNORED:
                log_softmax = F.log_softmax(head @ hidden[row, place - 1], dim=-1)
                total = total - log_softmax[labels[row, place]] + weight * log_softmax.max() ** 2
    return total


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_loss_and_gradients_equal_the_definition(
    hidden: Tensor, labels: Tensor, head: Tensor, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    projected: list[int] = []

    def count(rows: Tensor, *others: Any, **named: Any) -> Tensor:
        projected.append(len(rows))
        return linear_cross_entropy(rows, *others, **named)

    monkeypatch.setattr(models.loss.micro_batch, "linear_cross_entropy", count)
    loss = token_loss(hidden, labels, Bare(head), weight)
    expected = written_out(hidden, labels, head, weight)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, (hidden, head))
    torch.testing.assert_close(found, torch.autograd.grad(expected, (hidden, head)))
    assert found[0].abs().max() > 0
    assert projected == [int((labels[:, 1:] != IGNORED).sum())]  # the supervised ones alone


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_micro_batch_without_supervision_gives_zero_and_zero_gradients(
    hidden: Tensor, head: Tensor, weight: float
) -> None:
    labels = torch.full((ROWS, LENGTH), IGNORED)
    labels[:, 0] = 4  # nothing predicts the first token
    loss = token_loss(hidden, labels, Bare(head), weight)
    gradients = torch.autograd.grad(loss, (hidden, head))
    assert loss.item() == 0 and all(gradient.eq(0).all() for gradient in gradients)


def test_a_loss_of_ones_own_takes_the_place_of_the_cross_entropy(
    hidden: Tensor, labels: Tensor, head: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cross-entropy itself as that loss, all is as before; its tokens come a few at a time."""
    monkeypatch.setattr(models.loss.micro_batch, "chunk_tokens", lambda words, on_cpu: 4)
    seen: list[list[int]] = []

    def own(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append(list(logits.shape))
        assert logits.dtype == torch.float32
        return F.cross_entropy(logits, targets, reduction="none")

    loss = token_loss(hidden, labels, Bare(head), own=own)
    found = torch.autograd.grad(loss, (hidden, head))
    expected = token_loss(hidden, labels, Bare(head))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (hidden, head)))
    supervised = int((labels[:, 1:] != IGNORED).sum())
    assert seen[: len(seen) // 2] == [[min(4, supervised - first), WORDS] for first in range(0, supervised, 4)]
    assert len(token_loss(hidden, torch.full_like(labels, IGNORED), Bare(head), own=own).shape) == 0


def test_the_evaluation_loss_stays_the_cross_entropy(hidden: Tensor, labels: Tensor, head: Tensor) -> None:
    micro_batch = labels, torch.tensor(0.5), torch.tensor(1.0)

    def zero(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.sum(-1) * 0

    bare = Bare(head)
    assert micro_batch_loss(bare, (hidden,), micro_batch, own=zero).item() == 0
    found = micro_batch_loss(bare.eval(), (hidden,), micro_batch, own=zero)
    torch.testing.assert_close(found, token_loss(hidden, labels, bare) / 2)
