"""Global batches of preferences: pairs in one row, apart for attention, with what a loss over documents needs."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

from data.loader import GlobalBatch, Loader
from data.sample_set import InMemory, Sample, supervised_count
from data.settings import Packing
from models.attention.packed import Documents, unmarked
from options.preference.collation import JudgedCollation, judged

ROW = 64
PACKINGS: list[Packing] = [False, "batch", "dataset"]
TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4)]  # micro-batch size, replicas

Known = tuple[tuple[int, ...], tuple[int, ...], float, float]  # a document's ids and labels, and its facts


def pairs(count: int) -> list[Sample]:
    """Pairs of 4 to 60 tokens, whose documents' first tokens would be trained where nobody looked."""
    samples: list[Sample] = []
    for number in range(count):
        first, second = 2 + number * 7 % 29, 2 + number * 11 % 31
        ids = [3 * number + 1] * first + [3 * number + 2] * second
        labels = [-100 if place % 3 == number % 3 else token for place, token in enumerate(ids)]
        labels[0], labels[first] = ids[0], ids[first]
        samples.append({"input_ids": ids, "labels": labels, "first": first, "value": number / 2})
    return samples


def singles(count: int) -> list[Sample]:
    made = [[number + 1] * (2 + number * 11 % 29) for number in range(count)]
    return [{"input_ids": ids, "labels": ids, "value": float(place % 2)} for place, ids in enumerate(made)]


def make(samples: list[Sample], micro_batch_size: int, replicas: int, packing: Packing, least: int = 0) -> Loader:
    data = InMemory(samples)
    loader = Loader(
        data,
        8,
        micro_batch_size,
        replicas,
        5,
        packing=packing,
        row_length=ROW,
        least_micro_batches=least,
        collation=JudgedCollation(data),
    )
    judged(loader).reference = -numpy.arange(2 * len(samples), dtype=numpy.float32).reshape(-1, 2)
    return loader


def documents_in(inputs: tuple[Tensor, ...], loss: tuple[Tensor, ...]) -> list[Known]:
    """The documents of a micro-batch, in order, as its tensors hold them."""
    (ids, positions), (labels, _, _, documents, facts, _) = inputs, loss
    assert documents.shape == ids.shape and documents.dtype == torch.int64
    assert facts.dtype == torch.float32 and facts.shape == (int(documents.max()) + 1, 2)
    assert ((documents == -1) == (positions < 0)).all()
    found: list[Known] = []
    for number, (reference, value) in enumerate(facts.tolist()):
        there = documents == number
        assert len(there.nonzero()[:, 0].unique()) == 1, "a document lies in one row"
        assert positions[there].tolist() == list(range(int(there.sum())))
        found.append((tuple(ids[there].tolist()), tuple(labels[there].tolist()), reference, value))
    return found


def expected(samples: list[Sample], number: int) -> list[Known]:
    sample = samples[number]
    ids, labels, first = sample["input_ids"], sample["labels"], sample.get("first", 0)
    parts = [slice(0, first), slice(first, None)] if first else [slice(None)]
    return [
        (tuple(ids[part]), (-100, *labels[part][1:]), -2.0 * number - place, sample["value"])
        for place, part in enumerate(parts)
    ]


@pytest.mark.parametrize("make_samples", [pairs, singles])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("micro_batch_size", "replicas"), TOPOLOGIES)
def test_documents_are_told_apart_and_known(
    micro_batch_size: int, replicas: int, packing: Packing, make_samples: Callable[[int], list[Sample]]
) -> None:
    samples = make_samples(37)
    loader = make(samples, micro_batch_size, replicas, packing)
    for step in range(loader.steps_per_epoch):
        batch = loader.batch(step)
        for replica in range(replicas):
            made = list(loader.tensors(batch, replica))
            for rows, tensors in zip(batch.micro_batches[replica], made, strict=True):
                numbers = [number for row in rows for number in row]
                assert documents_in(*tensors) == [each for number in numbers for each in expected(samples, number)]
            for (rows_of, width), ((_, positions), _) in zip(loader.layouts(batch, replica), made, strict=True):
                assert Documents.laid_out(rows_of, width).rows == Documents.of(unmarked(positions)).rows


@pytest.mark.parametrize("make_samples", [pairs, singles])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("micro_batch_size", "replicas"), TOPOLOGIES)
def test_the_samples_and_the_chosen_tokens_of_a_global_batch_weigh_one(
    micro_batch_size: int, replicas: int, packing: Packing, make_samples: Callable[[int], list[Sample]]
) -> None:
    samples = make_samples(37)
    loader = make(samples, micro_batch_size, replicas, packing, least=2)
    for step in range(loader.steps_per_epoch):
        batch = loader.batch(step)
        assert weights(loader, batch, 1 if make_samples is singles else 2) == pytest.approx((1.0, 1.0), rel=1e-5)


def weights(loader: Loader, batch: GlobalBatch, documents_each: int) -> tuple[float, float]:
    """What all samples and all trained tokens of first documents weigh in the mean over micro-batches and replicas."""
    of_samples = of_tokens = 0.0
    for replica in range(loader.replicas):
        for _, (labels, scale, _, documents, facts, token_scale) in loader.tensors(batch, replica):
            of_samples += float(scale) * len(facts) / documents_each
            of_tokens += float(token_scale) * int(((labels != -100) & (documents % documents_each == 0)).sum())
    n_losses = batch.n_micro_batches * loader.replicas
    return of_samples / n_losses, of_tokens / n_losses


def test_an_empty_micro_batch_has_no_document() -> None:
    loader = make(pairs(9), 1, 4, False)
    batch = loader.batch(1)
    assert [len(rows) for replica in batch.micro_batches for rows in replica] == [1, 0, 0, 0]
    _, (labels, scale, share, documents, facts, _) = next(loader.tensors(batch, 3))
    assert facts.shape == (0, 2) and (documents == -1).all() and (labels == -100).all()
    assert share == 0 and scale == 4


def test_what_is_not_known_of_a_document_is_0() -> None:
    data = InMemory(pairs(8))
    loader = Loader(data, 8, 1, 1, 5, collation=JudgedCollation(data))
    facts = torch.cat([loss[4] for _, loss in loader.tensors(loader.batch(0), 0)])
    assert (facts[:, 0] == 0).all() and sorted(set(facts[:, 1].tolist())) == [number / 2 for number in range(8)]


def test_first_tokens_of_both_documents_do_not_count() -> None:
    sample: Sample = {"input_ids": [4, 5, 6, 7, 8], "labels": [4, 5, 6, 7, 8], "first": 3}
    data = InMemory([sample, {"input_ids": [4, 5], "labels": [4, 5]}])
    assert supervised_count(sample) == 3
    assert data.supervised.tolist() == [3, 1]
    assert data.first.tolist() == [3, 0] and data.first_supervised.tolist() == [2, 0] and not data.values.any()


def test_the_collation_of_fine_tuning_sends_nothing_more() -> None:
    loader = Loader(InMemory(singles(8)), 8, 2, 1, 5)
    assert [len(loss) for _, loss in loader.tensors(loader.batch(0), 0)] == [3] * 4
