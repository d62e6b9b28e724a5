"""torch's own flash attention over packed rows: all documents of a micro-batch in one launch.

It is the algorithm of the flash-attn package, which need not be installed; the rows are laid end to end, and each
document sees itself alone. It runs on GPUs from Ampere on, in bf16 and fp16.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

VARLEN = "torch_varlen"  # what transformers knows `attend` by
# torch 2.11 does not know grouped queries yet: keys and values are repeated.
_SHARES_KEYS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    document_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [B, heads, S, D] to [B, S, heads, D].

    Args:
        attention_mask: used where `cu_seq_lens_q` is absent, with a cache of keys.
        cu_seq_lens_q: where each document ends when the rows are laid end to end: [documents + 1] int32, from 0.
        max_length_q: tokens in the longest document.
        document_window: how many tokens each one sees at most, itself included.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped: dict[str, bool] = {}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and _SHARES_KEYS:
        grouped = {"enable_gqa": True}
    elif groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    # The kernel counts what is to the left of a token, without the token itself.
    left = -1 if document_window is None else document_window - 1
    kernel: Any = varlen_attn  # its signature differs between the versions of torch
    output: Tensor = kernel(
        *(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(left, 0),
        **grouped,
    )
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


ALL_ATTENTION_FUNCTIONS.register(VARLEN, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN, sdpa_mask)
