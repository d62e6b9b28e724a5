"""The losses of rewards and classes are those of trl and transformers, by their gradients too."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import Head
from options.preference.losses import REWARD_MEASURES
from options.scores.loss import CLASS_MEASURES, ScoreLoss
from tests.closeness import assert_near

WIDTH, LENGTHS = 8, (3, 5, 4, 2, 6, 7)


class Bare(Head):
    """A head that multiplies with a given matrix."""

    def __init__(self, weight: Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.lm_head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.lm_head.weight = torch.nn.Parameter(weight)


@pytest.mark.parametrize("cut", [(0, 6), (0, 2, 2, 6)], ids=str)
@pytest.mark.parametrize("pairs", [True, False])
def test_the_formulas_and_their_gradients(pairs: bool, cut: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = [torch.randn(n, WIDTH, generator=random).requires_grad_() for n in LENGTHS]
    head = Bare(torch.randn(1 if pairs else 3, WIDTH, generator=random))
    facts = torch.tensor([[0.0, value] for value in ([0.5, 0.5, 0.0, 0.0, 2.0, 2.0] if pairs else [0, 2, 1, 1, 0, 2])])
    last = torch.stack([each[-1] for each in hidden])
    scores = F.linear(last, head.lm_head.weight)
    if pairs:
        better, worse = scores.view(-1, 2).T
        losses = -torch.log(torch.sigmoid(better - worse - facts[::2, 1])) + 0.3 * (better + worse) ** 2
        right, sums = int((better > worse).sum()), [better.sum().item(), worse.sum().item()]
    else:
        losses = -F.log_softmax(scores, dim=-1)[torch.arange(6), facts[:, 1].long()]
        right, sums = int((scores.argmax(-1) == facts[:, 1]).sum()), []
    count = len(losses)
    expected = losses.mean()
    loss = ScoreLoss(pairs, 0.3 if pairs else 0.0)
    found = torch.zeros(())
    for begin, end in pairwise(cut):
        row = torch.cat([*hidden[begin:end], torch.zeros(3, WIDTH)])  # and padding
        documents = torch.tensor([each for each in range(end - begin) for _ in range(LENGTHS[begin + each])] + [-1] * 3)
        scales = torch.tensor(1 / count), torch.tensor(0.0), documents[None], facts[begin:end], torch.tensor(0.0)
        found = found + loss(head, (row[None],), (torch.zeros_like(documents)[None], *scales))
    assert_near(found, expected)
    leaves = [head.lm_head.weight, *hidden]
    for gradient, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert_near(gradient, other)
    assert loss.measures == (REWARD_MEASURES if pairs else CLASS_MEASURES)
    assert loss.take().tolist() == pytest.approx([count, right, *sums])
