"""Shows that losses of preferences are their published formulas, by their gradients too, however a batch is cut."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models.loss.lean
from models.loss.interface import IGNORED
from options.preference.losses import LOSSES, MEASURES, UNPAIRED_MEASURES, PairLoss, PreferenceLoss, UnpairedLoss
from tests.closeness import assert_near
from tests.models.loss.heads import Bare

WIDTH, WORDS, PAIRS, BETA = 8, 11, 6, 0.3
LENGTHS = torch.randint(3, 9, (PAIRS, 2), generator=torch.Generator().manual_seed(4)).tolist()
OBJECTIVES = {
    "dpo": PairLoss("dpo", BETA),
    "dpo, normalised, with cross-entropy": PairLoss("dpo", BETA, sft_weight=0.7, length_normalised=True),
    "cdpo": PairLoss("cdpo", BETA, label_smoothing=0.2),
    "ipo": PairLoss("ipo", BETA, length_normalised=True),
    "simpo": PairLoss("simpo", 2.0, gamma=0.6, length_normalised=True),
    "orpo": PairLoss("orpo", BETA, sft_weight=1.0, length_normalised=True),
}


def oracle(name: str, chosen: Tensor, rejected: Tensor, chosen_reference: Tensor, rejected_reference: Tensor) -> Tensor:
    """The formulas of the papers, for one pair, from token log-probabilities [n]."""
    log_ratio = chosen.sum() - chosen_reference - (rejected.sum() - rejected_reference)
    mean_ratio = (chosen.sum() - chosen_reference) / len(chosen) - (rejected.sum() - rejected_reference) / len(rejected)
    if name == "dpo":
        return -torch.log(torch.sigmoid(BETA * log_ratio))
    if name == "dpo, normalised, with cross-entropy":
        return -torch.log(torch.sigmoid(BETA * mean_ratio))
    if name == "cdpo":
        return -0.8 * torch.log(torch.sigmoid(BETA * log_ratio)) - 0.2 * torch.log(torch.sigmoid(-BETA * log_ratio))
    if name == "ipo":
        return (mean_ratio - 1 / (2 * BETA)) ** 2
    if name == "simpo":
        return -torch.log(torch.sigmoid(2.0 * (chosen.mean() - rejected.mean()) - 0.6))
    odds = [torch.exp(each.mean()) / (1 - torch.exp(each.mean())) for each in (chosen, rejected)]
    return -BETA * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))


class Batch:
    """Pairs of random documents whose first two tokens are the prompt."""

    def __init__(self, reference: bool) -> None:
        random = torch.Generator().manual_seed(0)
        self.weight = torch.randn(WORDS, WIDTH, generator=random).requires_grad_()
        self.ids = [[torch.randint(0, WORDS, (n,), generator=random) for n in pair] for pair in LENGTHS]
        self.hidden = [[torch.randn(n, WIDTH, generator=random).requires_grad_() for n in pair] for pair in LENGTHS]
        self.reference = -5 * torch.rand(PAIRS, 2, generator=random) * reference
        self.trained = sum(pair[0] - 2 for pair in LENGTHS)

    def leaves(self) -> list[Tensor]:
        return [self.weight, *(each for pair in self.hidden for each in pair)]

    def log_probabilities(self, pair: int, document: int) -> Tensor:
        found = F.log_softmax(self.hidden[pair][document] @ self.weight.T, dim=-1)
        return found[:-1].gather(-1, self.ids[pair][document][1:, None]).squeeze(-1)[1:]

    def expected(self, name: str) -> Tensor:
        """The mean over pairs, and the mean over tokens of better answers."""
        loss = torch.zeros(())
        for pair in range(PAIRS):
            chosen, rejected = self.log_probabilities(pair, 0), self.log_probabilities(pair, 1)
            loss = loss + oracle(name, chosen, rejected, *self.reference[pair]) / PAIRS
            loss = loss - OBJECTIVES[name].sft_weight * chosen.sum() / self.trained
        return loss

    def found(self, loss: PreferenceLoss, *pairs_of: range, values: Tensor | None = None) -> Tensor:
        """The sum of the parts of micro-batches of one row each; `values` are of documents."""
        values = torch.zeros(2 * PAIRS) if values is None else values
        total = torch.zeros(())
        head = Bare(self.weight)
        for pairs in pairs_of:
            ids = torch.cat([each for pair in pairs for each in self.ids[pair]] or [torch.zeros(3, dtype=torch.int64)])
            hidden = torch.cat([each for pair in pairs for each in self.hidden[pair]] or [torch.zeros(3, WIDTH)])
            sizes = [n for pair in pairs for n in LENGTHS[pair]]
            labels, documents = ids.clone(), torch.full_like(ids, -1)
            labels[:] = IGNORED
            begin = 0
            for number, size in enumerate(sizes):
                documents[begin : begin + size] = number
                labels[begin + 2 : begin + size] = ids[begin + 2 : begin + size]
                begin += size
            its = self.reference[list(pairs)].flatten(), values.view(-1, 2)[list(pairs)].flatten()
            facts = torch.stack(its, dim=1)
            scales = torch.tensor(1 / PAIRS), torch.tensor(0.0), documents[None], facts, torch.tensor(1 / self.trained)
            total = total + loss(head, (hidden[None],), (labels[None], *scales))
        return total


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("cut", [(0, 6), (0, 1, 4, 6), (0, 0, 5, 6)], ids=str)
def test_the_formula_and_every_gradient(name: str, cut: tuple[int, ...]) -> None:
    batch = Batch(reference=name not in ("simpo", "orpo"))
    expected = batch.expected(name)
    wanted = torch.autograd.grad(expected, batch.leaves())
    loss = PreferenceLoss(OBJECTIVES[name])
    found = batch.found(loss, *(range(*bounds) for bounds in pairwise(cut)))
    assert_near(found, expected)
    for gradient, other in zip(torch.autograd.grad(found, batch.leaves()), wanted, strict=True):
        assert_near(gradient, other)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_numbers_for_the_log(name: str) -> None:
    batch, loss = Batch(reference=name not in ("simpo", "orpo")), PreferenceLoss(OBJECTIVES[name])
    with torch.no_grad():
        batch.found(loss, range(2), range(2, PAIRS))
        logps = torch.tensor(
            [[batch.log_probabilities(pair, document).sum() for document in (0, 1)] for pair in range(PAIRS)]
        )
    rewards = logps - batch.reference
    if OBJECTIVES[name].length_normalised:
        rewards = rewards / (torch.tensor(LENGTHS) - 2)
    rewards = OBJECTIVES[name].beta * rewards
    n_pairs, *sums = loss.take().tolist()
    correct = int((rewards[:, 0] > rewards[:, 1]).sum())
    assert 0 < correct < PAIRS
    likelier = int((logps[:, 0] > logps[:, 1]).sum())
    assert 0 < likelier < PAIRS
    expected = [correct, *rewards.sum(0).tolist(), *logps.sum(0).tolist(), likelier]
    assert n_pairs == PAIRS and sums == pytest.approx(expected, rel=1e-5)
    assert loss.take().tolist() == [0.0] * (1 + len(MEASURES))


def test_only_the_sums_are_recorded_for_a_reference() -> None:
    batch, loss = Batch(reference=False), PreferenceLoss(OBJECTIVES["dpo"])
    loss.recorded = []
    with torch.no_grad():
        batch.found(loss, range(2), range(2, 2), range(2, PAIRS))
        sums = [batch.log_probabilities(pair, document).sum() for pair in range(PAIRS) for document in (0, 1)]
    assert [len(each) for each in loss.recorded] == [4, 0, 2 * PAIRS - 4]
    assert_near(torch.cat(loss.recorded), torch.stack(sums))
    assert loss.take()[0] == 0


@pytest.mark.parametrize("cut", [(0, 6), (0, 1, 4, 6), (0, 0, 5, 6)], ids=str)
@pytest.mark.parametrize("kl", [0.0, 1.7])
def test_kto_and_every_gradient(kl: float, cut: tuple[int, ...]) -> None:
    """Of twelve answers, every third is desirable; without `kl` it is trl's apo_zero_unpaired."""
    beta = 0.05  # by which no answer is so sure that 1 - sigmoid has few digits in fp32
    batch, good = Batch(reference=True), torch.arange(2 * PAIRS) % 3 == 0
    sums = torch.stack([batch.log_probabilities(pair, document).sum() for pair in range(PAIRS) for document in (0, 1)])
    ratios = sums - batch.reference.flatten()
    values = [1.5 * (1 - torch.sigmoid(beta * (each - kl))) for each in ratios[good]]
    values += [0.5 * (1 - torch.sigmoid(beta * (kl - each))) for each in ratios[~good]]
    expected = torch.stack(values).sum() / PAIRS  # the scale that the batch sends
    wanted = torch.autograd.grad(expected, batch.leaves())
    loss = UnpairedLoss(PairLoss("kto", beta, desirable_weight=1.5, undesirable_weight=0.5))
    loss.kl = kl
    found = batch.found(loss, *(range(*bounds) for bounds in pairwise(cut)), values=good.float())
    assert_near(found, expected)
    for gradient, other in zip(torch.autograd.grad(found, batch.leaves()), wanted, strict=True):
        assert_near(gradient, other)
    count, *means = loss.take().tolist()
    classes = [numbers[each].sum().item() for numbers in (beta * ratios, sums) for each in (good, ~good)]
    assert count == 2 * PAIRS and dict(zip(UNPAIRED_MEASURES, means, strict=True)) == pytest.approx(
        {"desirable": 4, "kl": 12 * kl}
        | dict(zip("rewards/chosen rewards/rejected logps/chosen logps/rejected".split(), classes, strict=True)),
        rel=1e-5,
    )
    assert loss.kl == 0 and loss.take().tolist() == [0.0] * (1 + len(UNPAIRED_MEASURES))


def test_a_sure_answer_has_a_finite_gradient() -> None:
    """The odds of a probability of 1 are infinite."""
    scores = torch.tensor([[0.0, -2.0], [-1e-9, 0.0]], requires_grad=True)
    losses = LOSSES["orpo"](OBJECTIVES["orpo"], scores)
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    assert losses.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_chunks_of_tokens_change_nothing(chunk: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(models.loss.lean, "CPU_CHUNK", chunk * 4 * WORDS)
    monkeypatch.setattr(models.loss.lean, "CPU_CACHE", math.ceil(chunk / 2) * 4 * WORDS)
    batch = Batch(reference=True)
    found = batch.found(PreferenceLoss(OBJECTIVES["dpo"]), range(PAIRS))
    expected = batch.expected("dpo")
    assert_near(found, expected)
    wanted = torch.autograd.grad(expected, batch.leaves())
    for gradient, other in zip(torch.autograd.grad(found, batch.leaves()), wanted, strict=True):
        assert_near(gradient, other)
