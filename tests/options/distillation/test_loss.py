"""Shows that the loss of a distillation is its formula, by its gradients too, however its tokens are cut."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models.loss.lean
from models.loss.interface import IGNORED
from models.loss.micro_batch import micro_batch_loss
from options.distillation.loss import DistillationLoss, TeacherWords
from tests.models.loss.heads import Bare

WIDTH, WORDS, TOKENS = 8, 23, 12


class Case:
    """A row of tokens, of which every third is not trained, a student and a teacher."""

    def __init__(self, cap: float | None = None) -> None:
        random = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(1, TOKENS + 1, WIDTH, generator=random).requires_grad_()
        self.weight = torch.randn(WORDS, WIDTH, generator=random).requires_grad_()
        self.teacher = 2 * torch.randn(WORDS, WIDTH, generator=random)
        self.labels = torch.randint(0, WORDS, (1, TOKENS + 1), generator=random)
        self.labels[0, ::3] = IGNORED
        self.cap = cap
        self.trained = (self.labels[0, 1:] != IGNORED).nonzero().squeeze(-1)

    def logits(self, weight: Tensor, hidden: Tensor | None = None) -> Tensor:
        logits = (self.hidden if hidden is None else hidden)[0, self.trained] @ weight.T
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def packed(self, top_k: int, weight: Tensor | None = None, limit: int = WORDS) -> Tensor:
        """What the pass of a teacher finds, in the order of the row."""
        found, numbers = TeacherWords(top_k, limit), torch.arange(len(self.trained))[:, None]
        head = Bare(self.teacher if weight is None else weight.detach(), self.cap)
        with torch.no_grad():
            found(head, (self.hidden,), (self.labels, torch.ones(()), torch.ones(()), numbers))
        order, words = found.take(torch.device("cpu"))
        assert order.tolist() == numbers.flatten().tolist()
        return words

    def expected(self, top_k: int, weight: float, temperature: float, z_loss_weight: float = 0.0) -> Tensor:
        """The formula, on all logits at once, by torch's own divergence."""
        logits, targets = self.logits(self.weight), self.labels[0, 1:][self.trained]
        with torch.no_grad():
            teacher = self.logits(self.teacher) / temperature
            others = teacher.argsort(dim=-1, descending=True)[:, top_k:]
            shares = teacher.scatter(-1, others, -math.inf).softmax(dim=-1)
        student = (logits / temperature).log_softmax(dim=-1)
        divergence = F.kl_div(student, shares, reduction="sum") * temperature**2
        z_loss = logits.log_softmax(dim=-1).amax(-1).square().sum()
        return (
            (1 - weight) * F.cross_entropy(logits, targets, reduction="sum")
            + weight * divergence
            + (z_loss_weight * z_loss)
        )

    def found(self, loss: DistillationLoss, packed: Tensor) -> Tensor:
        labels = self.labels, torch.ones(()), torch.ones(()), packed
        return loss(Bare(self.weight, self.cap), (self.hidden,), labels)


def assert_same(case: Case, found: Tensor, expected: Tensor) -> None:
    """The loss to 1e-6 of itself, and every gradient to 1e-5 of the largest number in it."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    leaves = case.hidden, case.weight
    wanted = torch.autograd.grad(expected, leaves)
    for gradient, other in zip(torch.autograd.grad(found, leaves), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("top_k", [1, 5, WORDS])
@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_the_formula_and_every_gradient(top_k: int, weight: float, temperature: float) -> None:
    case = Case()
    found = case.found(DistillationLoss(weight, temperature), case.packed(top_k))
    assert_same(case, found, case.expected(top_k, weight, temperature))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_chunks_of_tokens_change_nothing(chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap too, and the z-loss, which come between logits and divergence."""
    monkeypatch.setattr(models.loss.lean, "CPU_CHUNK", chunk * 4 * WORDS)
    monkeypatch.setattr(models.loss.lean, "CPU_CACHE", math.ceil(chunk / 2) * 4 * WORDS)
    case = Case(cap=4.0)
    found = case.found(DistillationLoss(0.6, temperature, z_loss_weight=0.2), case.packed(5))
    assert_same(case, found, case.expected(5, 0.6, temperature, 0.2))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_that_is_the_teacher_has_nothing_to_learn(temperature: float) -> None:
    """With all words; and soft targets of the neighbour token are seen."""
    case, loss = Case(), DistillationLoss(1.0, temperature)
    packed = case.packed(WORDS, case.weight)
    found = case.found(loss, packed)
    gradients = torch.autograd.grad(found, (case.hidden, case.weight))
    assert abs(found.item()) < 1e-5 and all(float(each.abs().max()) < 1e-5 for each in gradients)
    shifted = case.found(loss, packed.roll(1, dims=0))
    gradients = torch.autograd.grad(shifted, (case.hidden, case.weight))
    assert shifted.item() > 1 and all(float(each.abs().max()) > 0.1 for each in gradients)


def test_the_means_for_the_log() -> None:
    case, loss = Case(), DistillationLoss(0.4, 2.0)
    case.found(loss, case.packed(5)), case.found(loss, case.packed(5))
    tokens, cross_entropy, divergence = loss.take().tolist()
    assert tokens == 2 * len(case.trained)
    assert cross_entropy / 2 == pytest.approx(case.expected(5, 0.0, 2.0).item(), rel=1e-6)
    assert 4 * divergence / 2 == pytest.approx(case.expected(5, 1.0, 2.0).item(), rel=1e-6)
    assert loss.take().tolist() == [0.0, 0.0, 0.0]


def test_an_evaluation_is_the_cross_entropy() -> None:
    case, head = Case(), Bare(torch.zeros(WORDS, WIDTH))
    head.weight = case.weight
    labels = case.labels, torch.tensor(0.5), torch.ones(())
    loss = DistillationLoss(1.0, 2.0, z_loss_weight=0.5)
    with torch.no_grad():
        found = loss(head.eval(), (case.hidden,), labels)
        assert float(found) == float(micro_batch_loss(head, (case.hidden,), labels))
    assert loss.take()[0] == 0


def test_a_micro_batch_without_trained_tokens_is_zero() -> None:
    case, loss = Case(), DistillationLoss(0.5, 2.0)
    case.labels[:] = IGNORED
    case.trained = case.trained[:0]
    found = case.found(loss, case.packed(5))
    assert found.item() == 0
    assert all(not each.any() for each in torch.autograd.grad(found, (case.hidden, case.weight)))


def test_the_most_probable_words_are_those_of_the_whole_vocabulary() -> None:
    case = Case(cap=5.0)
    words, bits = case.packed(4, limit=20).unbind(1)
    found, expected = case.logits(case.teacher).log_softmax(dim=-1)[:, :20].topk(4)
    torch.testing.assert_close(bits.contiguous().view(torch.float32), found, rtol=1e-6, atol=1e-6)
    assert words.tolist() == expected.tolist()
