"""Know the chunks of a run's rows: how long they are, which sizes may be tried, and what they hand on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from models.attention.packed import Documents
from models.layers import Block
from models.parallel.sequence import Kernel, PartOfRows, share_attention
from models.spec import ModelSpec
from options.planner.layer_costs import LayerCase, fake_layer
from options.row_chunks.cuts import RowCuts
from options.row_chunks.keys import ChunkKeys
from training.config.keys import TrainConfig

SIZES = tuple(2**power for power in range(17, 8, -1))  # tokens of a chunk that are tried, the fastest kernels first
MOST = 128  # chunks of a row: of more, the bubble hardly shrinks
ADVISED, FEWEST = 8192, 16  # tokens of a chunk at most, and chunks of a row at least, where memory is short


def chunk_of(config: TrainConfig) -> int | None:
    """Return the tokens of a row's chunks; None where rows pass whole, or `auto` has not chosen yet."""
    chunk = config.row_chunk if isinstance(config, ChunkKeys) else None
    return None if chunk == "auto" else chunk


def can_chunk(config: TrainConfig, spec: ModelSpec) -> bool:
    """Say whether rows may pass in chunks."""
    return isinstance(config, ChunkKeys) and spec.family.chunks_rows


def fits_chunks(config: TrainConfig, spec: ModelSpec) -> bool:
    """Say whether the rest of a config goes with its chunks, if it has any."""
    return not chunk_of(config) or (can_chunk(config, spec) and not any(config.contradictions()))


def sizes_of(longest: int, least: int = 0) -> list[int]:
    """List the tokens of a chunk that may be tried for rows of so many; none for rows of fewer than `least`."""
    return [size for size in SIZES if longest / MOST <= size < longest >= least]


def advised(config: TrainConfig, least: int) -> list[int]:
    """Return the tokens of a chunk that need less memory, if any do, for rows of at least so many."""
    limit = config.sample_limit
    chunk = next(size for size in SIZES if size <= max(SIZES[-1], min(ADVISED, limit / FEWEST)))
    return [chunk] if isinstance(config, ChunkKeys) and limit >= least and chunk < (chunk_of(config) or limit) else []


def cut(spec: ModelSpec, chunk: int, most: int, rows: int, length: int, document: int) -> tuple[int, ...]:
    """Return the tokens of each chunk of rows that are filled with documents of one length.

    Args:
        most: tokens that a document may have, as in `options.row_chunks.cuts.cuts_of`.
    """
    whole, rest = divmod(length, document)
    lengths = [document] * whole + ([rest] if rest else [])
    return tuple(RowCuts(spec, chunk, max(chunk, most))([lengths] * rows, length))


class _Counted(PartOfRows):
    """Counts the numbers of keys and values that attention takes."""

    numbers = 0

    def own(self, whole: Tensor, dim: int) -> Tensor:
        return whole

    def attend(
        self, kernel: Kernel, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        self.numbers += key.numel() + value.numel()
        return kernel(module, query, key, value, mask, **options)[0]

    def mix(
        self,
        mixer: nn.Module,
        together: Callable[..., Tensor],
        hidden: Tensor,
        documents: Documents | None,
        **options: Any,
    ) -> Tensor:
        """Mix, and count nothing: states are small beside what a chunk keeps."""
        return together(hidden, **options)

    def summed(self, own: Tensor) -> Tensor:
        return own


def carried_by(spec: ModelSpec, case: LayerCase) -> int:
    """Count the numbers of keys and values that a layer keeps of a row in chunks (`models.attention.chunks`)."""
    counted = _Counted()
    share_attention()
    with fake_layer(spec, replace(case, flash=False), counted) as fake:
        if isinstance(fake.module, Block):
            fake.run()
    return counted.numbers
