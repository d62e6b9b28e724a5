"""Shows that the documents of a micro-batch are the same, read from its position ids or told by the loader."""

from __future__ import annotations

import pytest
import torch

from data.loader import Loader
from data.packing import Packing
from data.sample_set import InMemory
from models.attention.packed import Documents, unmarked

LENGTHS = [5, 1, 9, 3, 18, 30, 2, 8, 8, 31, 1]


def test_flash_is_told_where_documents_begin_and_how_long_the_longest_is() -> None:
    arguments = Documents([[5, 1, 9, 3], [18]]).flash_arguments(torch.device("cpu"))
    assert arguments["cu_seq_lens_q"].tolist() == [0, 5, 6, 15, 18, 36]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert arguments["max_length_q"] == arguments["max_length_k"] == 18


def test_rows_of_one_document_are_not_packed() -> None:
    assert not Documents.of(torch.arange(18).repeat(2, 1)).packed
    assert Documents.of(torch.arange(18).remainder(9)[None]).packed
    assert not Documents.laid_out([[5], []], 8).packed


@pytest.mark.parametrize("packing", [False, "batch", "dataset"])
@pytest.mark.parametrize(("micro_batch", "replicas"), [(1, 1), (2, 1), (2, 4)])
def test_the_loader_tells_what_position_ids_say(packing: Packing, micro_batch: int, replicas: int) -> None:
    samples = InMemory([{"input_ids": [3] * length, "labels": [3] * length} for length in LENGTHS])
    loader = Loader(samples, 8, micro_batch, replicas, seed=0, packing=packing, row_length=32)
    looked_at = 0
    for step in range(loader.steps_per_epoch):
        batch = loader.batch(step)
        for replica in range(replicas):
            layouts = loader.layouts(batch, replica)
            micro_batches = list(loader.tensors(batch, replica))
            assert len(layouts) == len(micro_batches)
            for (rows, length), ((_, position_ids), _) in zip(layouts, micro_batches, strict=True):
                told, read = Documents.laid_out(rows, length), Documents.of(unmarked(position_ids))
                assert told.rows == read.rows
                assert told.shape == tuple(position_ids.shape)
                looked_at += told.packed
    alone = packing == "batch" and micro_batch * replicas == 8  # a row for each sample of a batch
    assert bool(looked_at) == (bool(packing) and not alone)
