"""Shows that attention document by document equals a mask over the whole row: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.attention import _cur_sdpa_kernel_backends as backends

from models.attention import packed
from models.attention.documents import Documents
from models.attention.packed import by_cudnn, by_document

ROWS = [[5, 1, 9, 3], [18]]


class Grouped(nn.Module):
    """What the kernel asks of an attention layer with two queries a key."""

    num_key_value_groups = 2
    is_causal = True


@pytest.mark.parametrize(
    "by_document", [by_document, by_cudnn]
)  # on a CPU, where cuDNN is not, the next kernel follows
@pytest.mark.parametrize("window", [None, 4, 100])
def test_equals_a_mask_over_the_row(window: int | None, by_document: Callable[..., tuple[Tensor, None]]) -> None:
    torch.manual_seed(0)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])
    query, key, value = (torch.randn(2, heads, 18, 8, requires_grad=True) for heads in (4, 2, 2))
    found, _ = by_document(Grouped(), query, key, value, None, documents=Documents(ROWS), document_window=window)

    number = (positions == 0).cumsum(dim=1)
    distance = positions[:, :, None] - positions[:, None, :]
    seen = (number[:, :, None] == number[:, None, :]) & (distance >= 0)
    if window:
        seen &= distance < window
    twins = q, k, v = tuple(tensor.detach().clone().requires_grad_() for tensor in (query, key, value))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-6, rtol=0)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected.transpose(1, 2) * weights).sum().backward()
    for tensor, twin in zip((query, key, value), twins, strict=True):
        torch.testing.assert_close(tensor.grad, twin.grad, atol=1e-5, rtol=0)


def test_cudnn_is_asked_first_and_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[SDPBackend]] = []
    monkeypatch.setattr(packed, "by_document", lambda *_, **__: seen.append(backends(with_priority=True)))
    before = backends(with_priority=True)
    packed.by_cudnn()
    assert seen[0][0] == SDPBackend.CUDNN_ATTENTION and len(seen[0]) == 4
    assert backends(with_priority=True) == before
