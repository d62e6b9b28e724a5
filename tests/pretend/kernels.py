"""Attention that only a GPU has kernels for, computed in plain operations, with what is around it as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import models.attention.flex
import models.attention.packed
from tests.pretend.watch import Watch


def install(watch: Watch) -> None:
    setattr(models.attention.packed, "varlen_attn", partial(varlen_attention, watch))  # noqa: B010
    setattr(models.attention.flex, "flex_attention", dense_attention)  # noqa: B010


def varlen_attention(watch: Watch, *packed: Any, scale: float | None, window_size: Any, **options: Any) -> Tensor:
    """torch's varlen_attn: [T, heads, D] of documents end to end."""
    query, key, value, ends, *_ = packed
    with watch.silent():
        lengths = ends.diff().tolist()
    pieces = zip(*(tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    attend = partial(F.scaled_dot_product_attention, scale=scale, **options)
    outputs = []
    for piece in pieces:
        place = torch.arange(piece[0].shape[2], device=query.device)
        back = place[:, None] - place
        seen = (back >= 0) & (back <= window_size[0]) if window_size[0] >= 0 else back >= 0
        outputs.append(attend(*piece, attn_mask=seen))
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float | None, enable_gqa: bool
) -> Tensor:
    """torch's flex_attention with all scores at once: [B, heads, S, D]."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    shape = scores.shape
    ranges = [torch.arange(size, device=query.device) for size in shape]
    places = [each.view([-1 if at == own else 1 for at in range(4)]) for own, each in enumerate(ranges)]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    scores = scores.where(block_mask.mask_mod(*places), -torch.inf)
    return scores.softmax(dim=-1).to(value.dtype) @ value
