"""Pack several samples into one sequence, so that a micro-batch holds words instead of padding.

The mean instruction has 150 tokens where the limit is 2,048. `best_fit` puts samples into as few rows as it can: the
longest first, each into the fullest row that still has room (best-fit decreasing; at most 11/9 of the optimum, for real
lengths nearly always the optimum). `level` then spreads a global batch over a given number of rows so that all are
about equally long, since the slowest replica and the slowest micro-batch set the time of a step. Both are pure
functions of the lengths. A million samples take about two seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

MICRO_BATCHES_PER_STAGE = 4  # the pipeline's bubble is then at most a fifth of a step
ROUNDED = 64  # a chosen length is a multiple, which kernels like


def best_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Pack into sequences of at most `limit` tokens, each a list of positions in `lengths`, longest first.

    Raises:
        ValueError: a length is above the limit.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(limit + 1)]  # rows that have so much room left
    rooms = 0  # bit r is set where by_room[r] holds a row: the smallest sufficient room is found in one shift
    for position in _longest_first(lengths):
        length = lengths[position]
        if length > limit:
            raise ValueError(f"a sample of {length} tokens does not fit into a row of {limit}")
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = limit, len(rows)
            rows.append([])
        rows[row].append(position)
        by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


def level(lengths: Sequence[int], limit: int, multiple: int, least: int = 0) -> list[list[int]]:
    """Pack into the fewest rows (a multiple of `multiple`), of about equal length up to `limit` tokens.

    There are at least `least` rows.

    Each sample goes to the shortest row, the longest first; where that exceeds the limit, best fit decides. Rows may be
    empty. `lengths` and the result are as in `best_fit`.
    """
    packed = best_fit(lengths, limit)
    n_rows = max(-(-len(packed) // multiple) * multiple, least)
    rows: list[list[int]] = [[] for _ in range(n_rows)]
    filled = [(0, row) for row in range(n_rows)]
    for position in _longest_first(lengths):
        tokens, row = filled[0]
        if tokens + lengths[position] > limit:
            return packed + [[] for _ in range(n_rows - len(packed))]
        heapq.heapreplace(filled, (tokens + lengths[position], row))
        rows[row].append(position)
    return rows


def choose_row_length(
    mean: float, longest: int, limit: int, batch_size: int, micro_batch_size: int, replicas: int, stages: int
) -> int:
    """Choose a packed length that gives a step enough micro-batches to keep a pipeline busy.

    Args:
        mean, longest: of the samples, in tokens.
        limit: max_seq_len.
        batch_size: samples in a global batch.
        micro_batch_size: rows in a micro-batch.
    """
    micro_batches = MICRO_BATCHES_PER_STAGE * stages
    wanted = mean * batch_size / (micro_batches * micro_batch_size * replicas)
    return min(max(longest, -(-int(wanted) // ROUNDED) * ROUNDED), max(limit, longest))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda position: -lengths[position])
