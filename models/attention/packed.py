"""Attention over packed rows and through windows without a mask of S x S entries, most of them false.

* Document by document: each is a call of torch's scaled_dot_product_attention of its own: the same numbers, and the
  flash kernels that torch has for plain causal attention. A row of 2,048 tokens in 16 documents takes a fifth of the
  time on a CPU. The price is one kernel launch a document. Where a token sees a window of W tokens only, W queries at
  a time are given the 2 W keys that they can see: work and memory grow with S x W. `by_cudnn`
  prefers cuDNN's kernel, which is made for Hopper, among torch's.
* All documents in one launch: the rows are laid end to end for torch's own varlen_attn, the algorithm of the flash-attn
  package, which need not be installed. It runs on GPUs from Ampere on, in bf16 and fp16.

All are called as transformers calls attention, with [B, heads, S, D], and give [B, S, heads, D].
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# What transformers knows these by.
BY_DOCUMENT, BY_CUDNN, VARLEN = "sdpa_by_document", "cudnn_by_document", "torch_varlen"
ALIGNED = 16  # rows of a mask whose length is a multiple of this are used by a GPU's kernels as they are
AXES = 3  # of positions where there are images: time, height, width
LEAST = 512  # queries in a block of a window: of fewer, launches would cost more than what they save
# Where cuDNN cannot, as with some masks, the others follow.
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# torch 2.11 does not know grouped queries yet: keys and values are repeated.
_SHARES_KEYS = "enable_gqa" in inspect.signature(varlen_attn).parameters


@torch.compiler.disable  # compiled, it would be another program for every way to divide a row
def by_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    documents: Documents | None = None,
    document_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention document by document.

    Args:
        attention_mask: used where there are no `documents`.
        documents: None with a cache of keys.
        document_window: how many tokens each one sees at most, itself included.
    """
    if documents is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if not documents.packed:
        return _in_window(module, document_window, query, key, value, **options), None
    rows = []
    for row, lengths in enumerate(documents.rows):
        pieces = zip(*(tensor[row : row + 1].split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        rows.append(torch.cat([_in_window(module, document_window, *piece, **options) for piece in pieces], dim=1))
    return torch.cat(rows), None


@torch.compiler.disable
def by_cudnn(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """`by_document` by cuDNN's kernels."""
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        output: tuple[Tensor, None] = by_document(*arguments, **options)
        return output


def _in_window(
    module: nn.Module, window: int | None, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """Attend within one document a row, to at most `window` tokens.

    Each block of queries is given the keys that it can see, so neither masks nor scores of S x S are made.
    """
    length = query.shape[2]
    if window is None or length <= window:
        output: Tensor = sdpa_attention_forward(module, query, key, value, None, **options)[0]
        return output
    reach = -(-(window - 1) // ALIGNED) * ALIGNED  # how far behind its first query a block's keys begin
    block = min(max(reach, LEAST), length)
    # Keys begin `reach` before queries: query i sees keys i + reach - window + 1 to i + reach.
    seen = torch.ones(block, block + reach, dtype=torch.bool, device=query.device)
    seen = seen.tril(reach).triu(reach - window + 1)
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, float("-inf"))
    outputs = []
    for begin in range(0, length, block):
        end, first = min(begin + block, length), max(begin - reach, 0)
        columns = slice(reach - (begin - first), reach + (end - begin))
        keys = (tensor[:, :, first:end] for tensor in (key, value))
        known = mask[None, None, : end - begin, columns]
        outputs.append(sdpa_attention_forward(module, query[:, :, begin:end], *keys, known, **options)[0])
    return torch.cat(outputs, dim=1)


def in_one_launch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    document_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of all documents by varlen_attn.

    Args:
        attention_mask: used where `cu_seq_lens_q` is absent, with a cache of keys.
        cu_seq_lens_q: where each document ends when the rows are laid end to end: [documents + 1] int32, from 0.
        cu_seq_lens_k: the same of the keys, of which a document may have more, in front.
        max_length_q, max_length_k: tokens in the longest document.
        document_window: as in `by_document`.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped: dict[str, bool] = {}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and _SHARES_KEYS:
        grouped = {"enable_gqa": True}
    elif groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    kernel: Any = varlen_attn  # its signature differs between the versions of torch
    output: Tensor = kernel(
        *(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)),
        *(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k),
        scale=scaling,
        # The kernel counts what is to the left of a token, without the token itself.
        window_size=(-1 if document_window is None else document_window - 1, 0),
        **grouped,
    )
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


for name, function in ((BY_DOCUMENT, by_document), (BY_CUDNN, by_cudnn), (VARLEN, in_one_launch)):
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)


class Documents:
    """Lengths of the documents in each row of a micro-batch; rows have equal sums.

    Attributes:
        axes: positions along three axes, [3, B, S] int64, where images have others than text; None for all alike.
        together: [B, S] int64, of each token the number of the image, from 0 in the micro-batch, whose tokens see each
            other both ways; -1 elsewhere. None where all see backwards alone.
    """

    def __init__(
        self, rows: Iterable[Iterable[int]], axes: Tensor | None = None, together: Tensor | None = None
    ) -> None:
        self.rows = tuple(tuple(row) for row in rows)
        self.axes, self.together = axes, together

    def seeing(self, axes: Tensor | None, together: Tensor | None) -> Documents:
        """Get the same documents with what their images change."""
        return Documents(self.rows, axes, together)

    @classmethod
    def of(cls, position_ids: Tensor) -> Documents:
        """Read the lengths from position ids [B, S]; the host waits for the device."""
        rows = []
        for row in (position_ids.diff(dim=1) != 1).tolist():
            ends = [index + 1 for index, restart in enumerate(row) if restart] + [len(row) + 1]
            rows.append([end - begin for begin, end in zip([0, *ends], ends, strict=False)])
        return cls(rows)

    @classmethod
    def laid_out(cls, rows: Sequence[Sequence[int]], length: int) -> Documents:
        """Take the lengths of the samples in each row, before padding to `length`.

        Padding goes on counting behind a single sample, and is a document of its own behind several.
        """
        filled = ([*row, length - sum(row)] if len(row) > 1 else [length] for row in rows)
        return cls(filter(None, row) for row in filled)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens in a row."""
        return len(self.rows), sum(self.rows[0])

    @property
    def packed(self) -> bool:
        """Return whether some row holds several documents."""
        return any(len(row) > 1 for row in self.rows)

    def within(self, row: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield where each document of a row begins and ends that has tokens in columns `begin` to `end`."""
        for first, last in pairwise(accumulate(self.rows[row], initial=0)):
            if last > begin and first < end:
                yield first, last

    def flash_arguments(self, device: torch.device, begin: int = 0, end: int | None = None) -> dict[str, Any]:
        """Make the arguments of flash-attn's variable-length kernel.

        Args:
            begin, end: columns of the queries, where not all; keys are those of their documents up to there.
        """
        end = self.shape[1] if end is None else end
        documents = list(chain(*(self.within(row, begin, end) for row in range(len(self.rows)))))
        told: dict[str, Any] = {}
        for name, lengths in (
            ("q", [min(last, end) - max(first, begin) for first, last in documents]),
            ("k", [min(last, end) - first for first, last in documents]),
        ):
            # From pinned memory, so that the host does not wait for the copy.
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
            told[f"cu_seq_lens_{name}"] = ends.to(device, non_blocking=True)
            told[f"max_length_{name}"] = max(lengths)
        return told


def unmarked(position_ids: Tensor) -> Tensor:
    """Make ordinary position ids of those that mark padding."""
    return torch.where(position_ids < 0, -1 - position_ids, position_ids)


def document_lengths(position_ids: Tensor) -> Tensor:
    """Give each token of `position_ids` [B, S] its document's length, without padding."""
    documents = (position_ids == 0).cumsum(dim=1)
    last = torch.full((len(position_ids), position_ids.shape[1] + 1), -1, device=position_ids.device)
    last.scatter_reduce_(1, documents, position_ids, "amax")
    return last.gather(1, documents) + 1
