"""Shows that attention by document and through windows equals a mask over the whole row: outputs and gradients.

The documents are the same, whether they are read from position ids or set by the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.attention import _cur_sdpa_kernel_backends as backends
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.loader import Loader
from data.sample_set import InMemory
from data.settings import Packing
from models.attention import packed
from models.attention.packed import Documents, by_cudnn, by_document, unmarked
from tests.closeness import assert_near

ROWS = {"packed": [[5, 1, 9, 3], [18]], "long": [[3, 700], [703]], "whole": [[1300], [1300]]}


class Grouped(nn.Module):
    """What the kernel asks of an attention layer with two queries a key."""

    num_key_value_groups = 2
    is_causal = True


@pytest.mark.parametrize("by_document", [by_document, by_cudnn])  # which takes the next kernel on a CPU
@pytest.mark.parametrize("window", [None, 1, 4, 100, 600])
@pytest.mark.parametrize("rows", ROWS)
def test_equals_a_mask_over_the_row(
    rows: str, window: int | None, by_document: Callable[..., tuple[Tensor, None]]
) -> None:
    torch.manual_seed(0)
    documents = Documents(ROWS[rows])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents.rows])
    query, key, value = (torch.randn(2, heads, documents.shape[1], 8, requires_grad=True) for heads in (4, 2, 2))
    found, _ = by_document(Grouped(), query, key, value, None, documents=documents, document_window=window)

    number = (positions == 0).cumsum(dim=1)
    distance = positions[:, :, None] - positions[:, None, :]
    seen = (number[:, :, None] == number[:, None, :]) & (distance >= 0)
    if window:
        seen &= distance < window
    twins = q, k, v = tuple(tensor.detach().clone().requires_grad_() for tensor in (query, key, value))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
    assert_near(found, expected.transpose(1, 2))
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected.transpose(1, 2) * weights).sum(), twins)
    # All at once, as queries with one key have the gradient zero, of terms that cancel.
    assert_near(torch.cat([each.flatten() for each in gradients]), torch.cat([each.flatten() for each in wanted]))


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that is made."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), 0)
        return result


@pytest.mark.parametrize("rows", [[[8192]], [[8000, 192]]], ids=str)
def test_a_window_makes_nothing_that_grows_with_the_square(rows: list[list[int]]) -> None:
    query, key, value = (torch.randn(1, heads, 8192, 8, device="meta", requires_grad=True) for heads in (4, 2, 2))
    with Largest() as largest:
        found, _ = by_document(Grouped(), query, key, value, None, documents=Documents(rows), document_window=700)
        found.sum().backward()
    assert found.shape == (1, 8192, 4, 8)
    assert largest.numel < 8192**2 // 8


def test_cudnn_is_asked_first_and_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[SDPBackend]] = []
    monkeypatch.setattr(packed, "by_document", lambda *_, **__: seen.append(backends(with_priority=True)))
    before = backends(with_priority=True)
    packed.by_cudnn()
    assert seen[0][0] == SDPBackend.CUDNN_ATTENTION and len(seen[0]) == 4
    assert backends(with_priority=True) == before


LENGTHS = [5, 1, 9, 3, 18, 30, 2, 8, 8, 31, 1]


def test_flash_attention_gets_the_ends_of_documents_and_the_longest() -> None:
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
def test_the_loader_sets_what_position_ids_say(packing: Packing, micro_batch: int, replicas: int) -> None:
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
                ahead, read = Documents.laid_out(rows, length), Documents.of(unmarked(position_ids))
                assert ahead.rows == read.rows
                assert ahead.shape == tuple(position_ids.shape)
                looked_at += ahead.packed
    alone = packing == "batch" and micro_batch * replicas == 8  # a row for each sample of a batch
    assert bool(looked_at) == (bool(packing) and not alone)
