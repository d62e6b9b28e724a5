"""Global batches: a pure data order, equal shares, exact loss weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.loader import GlobalBatch, Loader
from data.sample_set import InMemory, Sample, supervised_count
from data.settings import Packing

ROW = 48
PACKINGS: list[Packing] = [False, "batch", "dataset"]
TOPOLOGIES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (8, 1)]  # micro-batch size, replicas


def make_samples(count: int) -> list[Sample]:
    """Samples of 2 to 30 tokens; all ids of sample k are k + 1, its last tokens are supervised."""
    samples: list[Sample] = []
    for number in range(count):
        length = 2 + number * 11 % 29
        silent = 1 + number % (length - 1)
        labels = [-100] * silent + [number + 1] * (length - silent)
        samples.append({"input_ids": [number + 1] * length, "labels": labels})
    return samples


def weights(loader: Loader, batch: GlobalBatch) -> tuple[float, float]:
    """What all supervised tokens, and all tokens, weigh in DeepSpeed's mean over micro-batches and replicas."""
    supervised = tokens = 0.0
    for replica in range(loader.replicas):
        for (_, positions), (labels, scale, share) in loader.tensors(batch, replica):
            supervised += float((labels[:, 1:] != -100).sum() * scale)
            tokens += float(share)
            assert float(share) * batch.tokens == pytest.approx(
                float((positions >= 0).sum()) * batch.n_micro_batches * loader.replicas
            )
    return supervised / (batch.n_micro_batches * loader.replicas), tokens / (batch.n_micro_batches * loader.replicas)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("micro_batch_size", "replicas"), TOPOLOGIES)
def test_every_sample_comes_once_an_epoch(micro_batch_size: int, replicas: int, drop_last: bool) -> None:
    loader = Loader(InMemory(make_samples(37)), 8, micro_batch_size, replicas, seed=1, drop_last=drop_last)
    assert loader.steps_per_epoch == (4 if drop_last else 5)
    for epoch in range(2):
        steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
        seen = [number for step in steps for number in loader.batch(step).samples]
        assert len(seen) == len(set(seen)) == (32 if drop_last else 37)


@pytest.mark.parametrize(("micro_batch_size", "replicas"), TOPOLOGIES)
def test_the_samples_of_a_step_do_not_depend_on_the_processes(micro_batch_size: int, replicas: int) -> None:
    reference = Loader(InMemory(make_samples(37)), 8, 1, 1, seed=1)
    loader = Loader(InMemory(make_samples(37)), 8, micro_batch_size, replicas, seed=1)
    for step in (7, 0, 4, 9):  # in any order: a step does not depend on the ones before
        batch = loader.batch(step)
        assert sorted(batch.samples) == sorted(reference.batch(step).samples)
        assert (batch.tokens, batch.supervised) == (reference.batch(step).tokens, reference.batch(step).supervised)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        loader = Loader(InMemory(make_samples(64)), 1, 1, 1, seed)
        return [loader.batch(epoch * 64 + position).samples[0] for position in range(64)]

    orders = [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1, 2)]
    assert order(1, 0) == orders[0]
    assert len({tuple(each) for each in orders}) == 6
    assert list(range(64)) not in orders


@settings(max_examples=60, deadline=None)
@given(
    packing=st.sampled_from(PACKINGS),
    count=st.integers(1, 40),
    micro_batch_size=st.integers(1, 5),
    replicas=st.integers(1, 5),
    factor=st.integers(1, 4),
)
def test_the_tokens_of_a_global_batch_weigh_one(
    packing: Packing, count: int, micro_batch_size: int, replicas: int, factor: int
) -> None:
    loader = Loader(
        InMemory(make_samples(count)),
        micro_batch_size * replicas * factor,
        micro_batch_size,
        replicas,
        seed=3,
        packing=packing,
        row_length=ROW,
    )
    for step in range(loader.steps_per_epoch):
        batch = loader.batch(step)
        assert {len(micro_batches) for micro_batches in batch.micro_batches} == {batch.n_micro_batches}
        assert all(len(numbers) <= micro_batch_size for replica in batch.micro_batches for numbers in replica)
        assert weights(loader, batch) == pytest.approx((1.0, 1.0), rel=1e-5)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("replicas", "least"), [(1, 4), (2, 0), (3, 8)])
def test_the_same_micro_batches_everywhere(replicas: int, least: int, packing: Packing) -> None:
    def micro_batches(replicas: int, least: int, batch: int) -> list[list[list[int]]]:
        loader = Loader(
            InMemory(make_samples(37)),
            12,
            2,
            replicas,
            seed=5,
            packing=packing,
            row_length=ROW,
            least_micro_batches=least,
            same_everywhere=True,
        )
        found = loader.batch(batch).micro_batches
        assert {len(each) for each in found} == {max(least, len(found[0]))}, "as many for each replica"
        return sorted(rows for replica in found for rows in replica if rows)

    for batch in (0, 3):  # the last one is smaller
        assert micro_batches(replicas, least, batch) == micro_batches(1, 0, batch)


def test_a_smaller_last_batch_is_shared_out_with_empty_micro_batches() -> None:
    loader = Loader(InMemory(make_samples(9)), 8, 1, 4, seed=0)
    batch = loader.batch(1)
    assert [len(numbers) for replica in batch.micro_batches for numbers in replica] == [1, 0, 0, 0]
    ((ids, positions), (labels, _, share)) = next(loader.tensors(batch, 3))
    assert ids.shape == positions.shape == labels.shape == (1, 8)
    assert (labels == -100).all()
    assert (positions < 0).all()
    assert share == 0


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("micro_batch_size", "replicas"), TOPOLOGIES)
def test_tensors_hold_the_samples_padded_to_multiples_of_eight(
    micro_batch_size: int, replicas: int, packing: Packing
) -> None:
    samples = make_samples(24)
    loader = Loader(InMemory(samples), 8, micro_batch_size, replicas, seed=5, packing=packing, row_length=ROW)
    batch = loader.batch(0)
    for replica in range(replicas):
        for rows, tensors in zip(batch.micro_batches[replica], loader.tensors(batch, replica), strict=True):
            (ids, positions), (labels, scale, share) = tensors
            longest = max((sum(len(samples[number]["input_ids"]) for number in row) for row in rows), default=1)
            width = -(-longest // 8) * 8
            assert width <= ROW
            assert ids.shape == positions.shape == labels.shape == (max(len(rows), 1), width)
            assert ids.dtype == positions.dtype == labels.dtype == torch.int64
            assert scale.dtype == share.dtype == torch.float32
            for index, row in enumerate(rows):
                begin = 0
                for number in row:
                    piece = slice(begin, begin + len(samples[number]["input_ids"]))
                    assert ids[index, piece].tolist() == samples[number]["input_ids"]
                    assert labels[index, piece].tolist() == [-100, *samples[number]["labels"][1:]]
                    assert (positions[index, piece] == torch.arange(piece.stop - begin)).all()
                    begin = piece.stop
                assert (labels[index, begin:] == -100).all()
                assert (-1 - positions[index, begin:] == torch.arange(begin, width)).all()


@pytest.mark.parametrize(("micro_batch_size", "replicas"), TOPOLOGIES)
def test_packing_a_batch_changes_its_shape_and_nothing_else(micro_batch_size: int, replicas: int) -> None:
    data = InMemory(make_samples(64))
    padded = Loader(data, 32, micro_batch_size, replicas, seed=5)
    packed = Loader(data, 32, micro_batch_size, replicas, seed=5, packing="batch", row_length=ROW)
    assert packed.steps_per_epoch == padded.steps_per_epoch
    for step in range(4):
        ours, theirs = packed.batch(step), padded.batch(step)
        assert sorted(ours.samples) == sorted(theirs.samples)
        assert (ours.tokens, ours.supervised) == (theirs.tokens, theirs.supervised)
        assert ours.n_micro_batches < theirs.n_micro_batches or micro_batch_size * replicas >= 8


def test_a_packed_epoch_is_cut_into_batches_of_rows() -> None:
    data = InMemory(make_samples(200))
    loader = Loader(data, 4, 1, 2, seed=5, packing="dataset", row_length=ROW)
    for epoch in range(2):
        batches = [loader.batch(epoch * loader.steps_per_epoch + step) for step in range(loader.steps_per_epoch)]
        assert sorted(number for batch in batches for number in batch.samples) == list(range(200))
        rows = [row for batch in batches for replica in batch.micro_batches for group in replica for row in group]
        assert [len(batch.micro_batches[0]) for batch in batches[:-1]] == [2] * (len(batches) - 1)
        filled = sum(int(data.lengths[row].sum()) for row in rows) / (len(rows) * ROW)
        assert filled > 0.95
    first = [sorted(map(sorted, loader.batch(step).micro_batches[0][0])) for step in range(3)]
    assert first != [sorted(map(sorted, loader.batch(len(batches) + step).micro_batches[0][0])) for step in range(3)]


def test_only_chosen_samples_take_part() -> None:
    loader = Loader(InMemory(make_samples(20)), 4, 1, 1, seed=5, numbers=[3, 5, 8, 13])
    assert loader.steps_per_epoch == 1
    assert sorted(loader.batch(0).samples) == [3, 5, 8, 13]


def test_a_batch_counts_its_tokens_without_padding() -> None:
    samples = make_samples(8)
    batch = Loader(InMemory(samples), 8, 2, 2, seed=5).batch(0)
    assert batch.tokens == sum(len(sample["input_ids"]) for sample in samples)
    assert batch.supervised == sum(map(supervised_count, samples))


def test_an_epoch_without_a_whole_batch_is_refused() -> None:
    with pytest.raises(DataError, match="batch"):
        Loader(InMemory(make_samples(7)), 8, 1, 1, seed=0, drop_last=True)


def test_the_first_token_is_not_trained_as_nothing_predicts_it() -> None:
    assert supervised_count({"input_ids": [5, 6, 7], "labels": [5, -100, 7]}) == 1


def test_rows_are_padded_to_the_multiple_that_is_asked_for() -> None:
    """fp8's kernels want multiples of 16 tokens; what is trained on stays the same."""
    data = InMemory(make_samples(37))
    usual, wide = (Loader(data, 8, 1, 1, seed=1, pad_multiple=multiple) for multiple in (8, 16))
    batches = usual.batch(0), wide.batch(0)
    assert batches[0] == batches[1]
    shapes = [loader.shapes(batch, 0) for loader, batch in zip((usual, wide), batches, strict=True)]
    assert [(rows, -(-length // 16) * 16) for rows, length in shapes[0]] == shapes[1] != shapes[0]
