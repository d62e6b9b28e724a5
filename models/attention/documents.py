"""How long the documents in the rows of a micro-batch are: what attention over packed rows goes by.

Kernels want these lengths as numbers on the host. Reading them from the position ids makes the host wait for the
device; but whoever lays a micro-batch out knows them, and `models.attention.positions` can be told ahead. Padding at
the end of a packed row counts as one more document, so the documents always fill the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor


class Documents:
    """The lengths of the documents in each row of a micro-batch; each row sums to the same."""

    def __init__(self, rows: Iterable[Iterable[int]]) -> None:
        self.rows = tuple(tuple(row) for row in rows)

    @classmethod
    def of(cls, position_ids: Tensor) -> Documents:
        """From position ids [B, S], which restart with each document; the host waits for them."""
        rows = []
        for row in (position_ids.diff(dim=1) != 1).tolist():
            ends = [index + 1 for index, restart in enumerate(row) if restart] + [len(row) + 1]
            rows.append([end - begin for begin, end in zip([0, *ends], ends, strict=False)])
        return cls(rows)

    @classmethod
    def laid_out(cls, rows: Sequence[Sequence[int]], length: int) -> Documents:
        """From the lengths of the samples that were put into each row, before it was padded to `length`.

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
        """Whether some row holds several documents."""
        return any(len(row) > 1 for row in self.rows)

    def flash_arguments(self, device: torch.device) -> dict[str, Any]:
        """What flash-attn's kernel for lengths of all kinds takes, the rows one after the other."""
        ends = [0, *accumulate(chain.from_iterable(self.rows))]
        # From pinned memory, so that the host does not wait for the copy.
        cumulative = torch.tensor(ends, dtype=torch.int32, pin_memory=device.type == "cuda")
        cumulative = cumulative.to(device, non_blocking=True)
        ends_told: dict[str, Any] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cumulative)
        return ends_told | dict.fromkeys(("max_length_q", "max_length_k"), max(chain.from_iterable(self.rows)))
