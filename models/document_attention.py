"""Attention over packed rows, one document at a time.

A mask for a packed row has S x S entries, most of them false, and torch's kernels compute all of them. Here each
document is a call of torch's scaled_dot_product_attention of its own: the same numbers, no mask, and the flash kernels
that torch has for plain causal attention. A row of 2,048 tokens in 16 documents takes a fifth of the time on a CPU. The
price is one kernel launch a document; flash attention does the same in one. Of torch's kernels cuDNN's, which is made
for Hopper, is taken where it is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.documents import Documents

BY_DOCUMENT, BY_CUDNN = "sdpa_by_document", "cudnn_by_document"  # what transformers knows these by
# Where cuDNN cannot, as with some masks, the others follow.
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@torch.compiler.disable  # compiled, it would be another program for every way to divide a row
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    documents: Documents | None = None,
    document_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [B, heads, S, D] to [B, S, heads, D].

    Args:
        attention_mask: used where no row is packed.
        documents: None with a cache of keys.
        document_window: how many tokens each one sees at most, itself included.
    """
    if documents is None or not documents.packed:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows = []
    for row, lengths in enumerate(documents.rows):
        pieces = [tensor[row : row + 1].split(lengths, dim=2) for tensor in (query, key, value)]
        outputs = [
            sdpa_attention_forward(module, *piece, _window_mask(piece[0], document_window), **options)[0]
            for piece in zip(*pieces, strict=True)
        ]
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows), None


@torch.compiler.disable
def attend_by_cudnn(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """`attend` by cuDNN's kernels."""
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        output: tuple[Tensor, None] = attend(*arguments, **options)
        return output


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """Who sees whom in a document [1, heads, L, D]: [1, 1, L, L]; None where plain causal attention says it."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    return ((distance >= 0) & (distance < window))[None, None]


for name, function in ((BY_DOCUMENT, attend), (BY_CUDNN, attend_by_cudnn)):
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
