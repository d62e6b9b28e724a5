"""What a teacher says of a token goes with that token, wherever its row, micro-batch and replica are."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from data.loader import Loader
from data.sample_set import IGNORED, InMemory, Sample
from models.loss.interface import supervised_positions
from options.distillation.collation import TaughtCollation


def samples() -> InMemory:
    """Each token's id is its own, and every third is not trained."""
    made, begin = list[Sample](), 1000
    for length in (9, 30, 4, 17, 1, 22, 13):
        ids = list(range(begin, begin + length))
        made.append({"input_ids": ids, "labels": [IGNORED if each % 3 == 0 else each for each in ids]})
        begin += 1000
    return InMemory(made)


@pytest.mark.parametrize("packing", [False, "batch", "dataset"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_trained_token_gets_its_own(packing: Any, replicas: int) -> None:
    data = samples()
    taught = TaughtCollation(data)
    loader = Loader(data, 4, 2, replicas, seed=3, packing=packing, row_length=64, collation=taught)
    trained = [label for sample in data.samples for label in sample["labels"][1:] if label != IGNORED]
    taught.known = numpy.array(trained, numpy.int32)[:, None]
    seen = list[int]()
    for step in range(loader.steps_per_epoch):
        batch = loader.batch(step)
        for replica in range(replicas):
            for _, (labels, *_, soft) in loader.tensors(batch, replica):
                positions = supervised_positions(labels, labels.shape[1])
                assert soft.squeeze(1).tolist() == labels.flatten()[positions + 1].tolist()
                seen += soft.squeeze(1).tolist()
    assert sorted(seen) == sorted(trained)


def test_tokens_are_numbered_sample_by_sample() -> None:
    taught = TaughtCollation(samples())
    counts = taught.data.supervised.tolist()
    assert taught.first_tokens.tolist() == [sum(counts[:number]) for number in range(len(counts) + 1)]


def test_without_a_teacher_nothing_is_sent() -> None:
    loader = Loader(samples(), 4, 2, 1, seed=0, collation=TaughtCollation(samples()))
    ((_, sent), *_) = loader.tensors(loader.batch(0), 0)
    assert len(sent) == 3 and all(isinstance(each, torch.Tensor) for each in sent)
