"""Shows that attention by document and through windows equals a mask over the whole row: outputs and gradients."""

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

from models.attention import packed
from models.attention.packed import Documents, by_cudnn, by_document
from tests.closeness import assert_near

ROWS = {"packed": [[5, 1, 9, 3], [18]], "long": [[3, 700], [703]], "whole": [[1300], [1300]]}


class Grouped(nn.Module):
    """What the kernel asks of an attention layer with two queries a key."""

    num_key_value_groups = 2
    is_causal = True


@pytest.mark.parametrize(
    "by_document", [by_document, by_cudnn]
)  # on a CPU, where cuDNN is not, the next kernel follows
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
