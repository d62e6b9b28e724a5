"""Which token a layer ahead has to predict, and what its samples are averaged over."""

from __future__ import annotations

import torch

from data.collation import Carried
from data.loader import Loader
from data.sample_set import InMemory
from models.loss.interface import IGNORED
from options.multi_token.collation import AheadCollation, further, targets_ahead

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
    (_, (_, scale, _, input_ids, *found, scales)), *_ = loader.tensors(batch, 0)
    n_losses = loader.n_losses(batch)
    torch.testing.assert_close(scale, torch.tensor(n_losses / 7))
    torch.testing.assert_close(scales, torch.tensor([n_losses / 4, n_losses / 2, n_losses / 1]))
    assert input_ids.shape == (1, 8) and len(found) == 2 * 3


def test_ranks_that_share_rows_have_the_places_of_their_own_tokens() -> None:
    data = InMemory([])
    collation = AheadCollation(data, depth=1)
    ids = torch.arange(10)[None].repeat(2, 1)
    sent = collation.to_last(ids, POSITIONS.repeat(2, 1), LABELS.repeat(2, 1))
    assert sent[1].tolist() == [0, 1, 2, 5, 10, 11, 12, 15] and sent[2].tolist() == 2 * [12, 13, 14, 22]
    carried = Carried(last=(*sent, torch.ones(1)))
    left, right = (collation.part(carried, LABELS, columns, 2).last for columns in (slice(0, 4), slice(4, 10)))
    assert left[1].tolist() == [0, 1, 2, 4, 5, 6] and left[2].tolist() == 2 * [12, 13, 14]
    assert right[1].tolist() == [1, 7] and right[2].tolist() == [22, 22]
    assert left[3].tolist() == [2.0]
