"""Shows what micro-batches are like when they reach the engine, and on a GPU that they arrive in order and whole."""

from __future__ import annotations

import pytest
import torch

from data.loader import Loader
from data.sample_set import InMemory, Sample
from models.loss import IGNORED
from training.engine.prefetch import ahead

SAMPLES: list[Sample] = [
    {"input_ids": list(range(3, 3 + length)), "labels": [IGNORED] * 2 + list(range(5, 3 + length))}
    for length in (9, 4, 14, 7, 2, 30)
]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="copies go to a GPU only")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_micro_batches_come_in_order_with_their_supervised_positions(device: str) -> None:
    loader = Loader(InMemory(SAMPLES), 6, 2, 1, seed=0, packing="batch", row_length=32)
    batch = loader.batch(0)
    sent = list(ahead(loader.tensors(batch, 0), torch.device(device)))
    made = list(loader.tensors(batch, 0))
    assert len(sent) == len(made) == batch.n_micro_batches
    for (inputs, (*labels, supervised)), (expected_inputs, expected_labels) in zip(sent, made, strict=True):
        for found, expected in zip((*inputs, *labels), (*expected_inputs, *expected_labels), strict=True):
            assert found.device.type == device
            assert torch.equal(found.cpu(), expected)
        rows, length = expected_labels[0].shape
        wanted = [
            row * length + column
            for row in range(rows)
            for column in range(length - 1)
            if expected_labels[0][row, column + 1] != IGNORED
        ]
        assert supervised.tolist() == wanted
