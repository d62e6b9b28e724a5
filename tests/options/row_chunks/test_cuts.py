"""Cuts: chunks of equal work, which every process finds."""

from __future__ import annotations

import numpy
import pytest

from models.flops import ModelFlops
from models.spec import ModelSpec
from options.row_chunks.cuts import RowCuts
from tests.models.helpers import spec_of
from training.metrics.devices import Device


def works(spec: ModelSpec, lengths: list[int], cuts: list[int]) -> list[float]:
    """Count each chunk's work, token by token."""
    flops = ModelFlops(spec)
    of_tokens = []
    for length in lengths:
        for seen in range(1, length + 1):
            pairs = sum(min(seen, window) for window in flops.windows)
            of_tokens.append(sum(flops.blocks) + flops.pair / Device.attention * pairs)
    return [float(sum(each)) for each in numpy.split(of_tokens, numpy.cumsum(cuts)[:-1])]


@pytest.mark.parametrize("lengths", [[4096], [1000, 3000, 96], [64] * 64])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_chunks_take_equally_long(family: str, lengths: list[int]) -> None:
    spec = spec_of(family, sliding_window=256) if family == "gemma2" else spec_of(family)
    cuts = RowCuts(spec, 512, 4096)([lengths], 4096)
    assert sum(cuts) == 4096
    found = works(spec, lengths, cuts)
    # But for parts of what had too many tokens.
    alike = [work for work, size in zip(found, cuts, strict=True) if size <= 512] or found
    assert max(found) <= 1.01 * min(alike), cuts
    whole = works(spec, [4096], [4096])[0]
    assert max(found) <= 1.01 * whole / 8, "no more work than a chunk of the longest document"


def test_later_chunks_of_a_long_document_are_shorter_and_short_documents_make_fewer() -> None:
    cut = RowCuts(spec_of(), 1024, 4096)
    long, short = cut([[4096]], 4096), cut([[64] * 64], 4096)
    assert len(long) == 4
    assert long == sorted(long, reverse=True)
    assert long[0] > 1.5 * long[-1]
    assert len(short) < 4
    assert max(short) - min(short) <= 64


@pytest.mark.parametrize(
    ("chunk", "rows", "length", "expected"),
    [
        (4096, [[4096]], 4096, [4096]),
        (9999, [[4096]], 4096, [4096]),
        (1, [[5]], 5, [1] * 5),
        (1, [[2, 3], [5]], 5, [1] * 5),
        (4096, [[]], 16, [16]),
    ],
)
def test_whole_rows_and_single_tokens(chunk: int, rows: list[list[int]], length: int, expected: list[int]) -> None:
    assert RowCuts(spec_of(), chunk, max(chunk, 5))(rows, length) == expected


def test_no_chunk_has_more_than_twice_the_tokens() -> None:
    """The first tokens of a long row see few others, as those of short documents do."""
    spec = spec_of()
    for lengths, most in (([4096], 452), ([64] * 64, 512)):
        cuts = RowCuts(spec, 256, 4096)([lengths], 4096)
        assert sum(cuts) == 4096 and max(cuts) == most
        assert max(works(spec, lengths, cuts)) <= 1.01 * works(spec, [4096], [4096])[0] / 16
    two = RowCuts(spec, 256, 4096)([[4096], [64] * 64], 4096)
    assert sum(two) == 4096 and max(two) <= 256


def test_several_rows_are_cut_at_the_same_columns() -> None:
    cut = RowCuts(spec_of(), 512, 1024)
    assert len(cut([[1024], [1024]], 1024)) == 4  # of two rows of two units each
    assert sum(cut([[1000], [24, 300]], 1024)) == 1024, "padding takes time, too"
