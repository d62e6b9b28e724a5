"""torch's flex attention: one kernel, compiled for what a family does to its scores and for who sees whom.

It takes the families that flash attention leaves out or that cap their scores: ALiBi biases (Bloom, Baichuan2-13B), the
tanh of Gemma 2, sliding windows. Scores live in the kernel only, biases are made where they are used, in fp32, and
blocks of 128 x 128 of which no token sees any are skipped, so a packed row costs about what its documents cost.

The blocks are found once per micro-batch and kind of attention, on the device and without waiting for it, at the price
of some S x S booleans a row. Compiling takes a minute at the first steps. On a CPU torch has a plain form of it without
gradients, so nothing but tests uses it there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FLEX = "torch_flex"  # what transformers knows `attend` by


class Scope(NamedTuple):
    """A mask in the form of flex attention: visible blocks and ALiBi slopes."""

    blocks: BlockMask
    slopes: Tensor | None  # of ALiBi, [heads] fp32
    begin: int = 0  # the column of the first query


def scope(
    position_ids: Tensor, window: int | None = None, slopes: Tensor | None = None, columns: slice | None = None
) -> Scope:
    """Make the scope of causal attention within documents.

    Args:
        position_ids: [B, S], restarting with each document.
        window: how many tokens each one sees at most, itself included.
        columns: of the queries, where not all; keys are those up to there.
    """
    rows, length = position_ids.shape
    begin, end = (columns.start, columns.stop) if columns else (0, length)
    number = nn.functional.pad((position_ids.diff(dim=1) != 1).cumsum(dim=1), (1, 0))

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query + begin
        seen = (number[row, query] == number[row, key]) & (key <= query)
        return seen if window is None else seen & (key > query - window)

    blocks = create_block_mask(sees, rows, None, end - begin, end, device=position_ids.device)
    return Scope(blocks, slopes, begin)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Scope,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run flex attention as transformers calls it: [B, heads, S, D] to [B, S, heads, D].

    Args:
        attention_mask: the scope; there is no attention with a cache of keys.
        softcap: scores are squeezed between -softcap and softcap by a tanh.
    """
    as_it_is = query.device.type == "cpu" or torch.compiler.is_compiling()  # a block that is compiled compiles it too
    kernel: Any = flex_attention if as_it_is else _compiled()
    output: Tensor = kernel(
        *(query, key, value),
        score_mod=_score_change(softcap, attention_mask.slopes, attention_mask.begin),
        block_mask=attention_mask.blocks,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2), None


def _score_change(softcap: float | None, slopes: Tensor | None, begin: int) -> Callable[..., Tensor] | None:
    if softcap is None and slopes is None:
        return None

    def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score + slopes[head] * (key - query - begin)
        return score

    return change


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


ALL_ATTENTION_FUNCTIONS.register(FLEX, attend)
