"""Which token a layer ahead has to predict, and what its samples are averaged over."""

from __future__ import annotations

import torch

from data.loader import Loader
from data.sample_set import InMemory
from models.loss.micro_batch import IGNORED
from options.multi_token.collation import AheadCollation
from options.multi_token.loss import further, targets_ahead

# Two documents of five and three tokens, and two of padding; all but their first tokens are trained.
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, -1, -2]])
LABELS = torch.tensor([[IGNORED, 11, 12, 13, 14, IGNORED, 21, 22, IGNORED, IGNORED]])


def test_no_target_lies_in_another_document() -> None:
    none = IGNORED
    first, second, third = (targets_ahead(LABELS, POSITIONS, k)[0].tolist() for k in (1, 2, 3))
    assert first == [12, 13, 14, none, none, 22, none, none, none, none]
    assert second == [13, 14, none, none, none, none, none, none, none, none]
    assert third == [14, none, none, none, none, none, none, none, none, none]


def test_without_positions_targets_would_cross_documents() -> None:
    """What the test above would see: the second layer would predict the next document's tokens."""
    wrong = further(LABELS, 3, fill=IGNORED)[0].tolist()
    assert wrong[3:5] == [21, 22]


def test_rows_shorter_than_the_way_ahead_have_no_target() -> None:
    labels, positions = torch.tensor([[IGNORED, 5]]), torch.tensor([[0, 1]])
    assert targets_ahead(labels, positions, 3)[0].tolist() == [IGNORED, IGNORED]
    assert further(torch.tensor([[7, 8]]), 5)[0].tolist() == [0, 0]


def test_each_depth_is_a_mean_over_its_own_targets() -> None:
    """Tokens that are trained from the first on come too early to be predicted further ahead."""
    ids = [[3, 4, 5, 6, 7], [3, 4, 5], [3, 4]]
    samples = [{"input_ids": each, "labels": each} for each in ids]  # 4, 2 and 1 trained tokens
    data = InMemory(samples)  # type: ignore[arg-type]
    loader = Loader(data, 3, 1, replicas=1, seed=0, collation=AheadCollation(data, depth=3))
    batch = loader.batch(0)
    assert batch.supervised == 7
    (_, (_, scale, _, input_ids, labels, scales)), *_ = loader.tensors(batch, 0)
    n_losses = loader.n_losses(batch)
    torch.testing.assert_close(scale, torch.tensor(n_losses / 7))
    torch.testing.assert_close(scales, torch.tensor([n_losses / 4, n_losses / 2, n_losses / 1]))
    assert input_ids.shape == labels.shape
