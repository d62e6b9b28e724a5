"""Cut rows into chunks of equal work.

A token costs its products with the weights, and attention to the tokens of its document that it sees. Of a long
document later chunks are shorter, as their tokens see more; with chunks of equal lengths, all stages of a pipeline
would wait for the last ones. Where tokens see few others, no chunk has more than `MOST` times the tokens of an average
one: of all, the longest one's activations must fit. Every process makes the same cuts, in whole numbers, of what all
know: the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import ceil, inf

import numpy
from numpy.typing import NDArray

from models.attention.packed import Documents
from models.flops import ModelFlops
from models.spec import ModelSpec
from options.row_chunks.keys import ChunkKeys
from training.config.keys import TrainConfig
from training.metrics.devices import Device

TOKEN = 2**30  # what the products of a token count; all else in proportion
MOST = 2


class RowCuts:
    """The cuts of a model's rows.

    Args:
        chunk: tokens of a chunk, on average over a row of one document that is as long as rows may be.
        longest: tokens of such a row.
    """

    def __init__(self, spec: ModelSpec, chunk: int, longest: int) -> None:
        flops = ModelFlops(spec)
        # Attention kernels reach less of a device's peak than large products.
        pair = flops.pair / Device.attention / sum(flops.blocks) * TOKEN
        self._pairs = {window: round(pair * flops.windows.count(window)) for window in set(flops.windows)}
        self._unit = ceil(int(self._work([longest]).sum()) / ceil(longest / chunk))
        self._most = MOST * chunk

    def __call__(self, rows: Sequence[Sequence[int]], length: int) -> list[int]:
        """Return the tokens that each chunk has of every row of a micro-batch.

        Args:
            rows: lengths of the samples in each row, before padding to `length`.
        """
        documents = Documents.laid_out(rows, length)
        done = numpy.sum([self._work(row) for row in documents.rows], axis=0).cumsum()
        count = min(length, -(-int(done[-1]) // self._unit))
        targets = int(done[-1]) // count * numpy.arange(1, count)

        bounds = numpy.searchsorted(done, targets) + 1
        numbers = numpy.arange(1, count)  # each chunk has a token at least
        bounds = numpy.maximum.accumulate(numpy.append(0, bounds - numbers))[1:] + numbers
        bounds = numpy.minimum(bounds, length - count + numbers)
        sizes = numpy.diff([0, *bounds, length]).tolist()
        most = max(1, self._most // len(rows))
        return list(chain.from_iterable(_shared(size, -(-size // most)) for size in sizes))

    def _work(self, lengths: Sequence[int]) -> NDArray[numpy.int64]:
        """Count the work of each token in a row of documents."""
        seen = numpy.concatenate([numpy.arange(1, length + 1) for length in lengths])
        work = numpy.full(len(seen), TOKEN)
        for window, pair in self._pairs.items():
            work += pair * (seen if window == inf else numpy.minimum(seen, int(window)))
        return work


def _shared(size: int, count: int) -> list[int]:
    """Cut a chunk into so many, of equal lengths but for one token."""
    least, more = divmod(size, count)
    return [least + 1] * more + [least] * (count - more)


def cuts_of(config: TrainConfig, spec: ModelSpec) -> RowCuts | None:
    """Return how a config's rows are cut; None where they pass whole."""
    if not isinstance(config, ChunkKeys) or not config.row_chunk:
        return None
    assert config.row_chunk != "auto", "the planner chooses before the model is built"
    return RowCuts(spec, config.row_chunk, max(config.row_chunk, config.max_seq_len))
