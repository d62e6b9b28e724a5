"""What autograd saves of each layer for a micro-batch, or for a chunk of its rows (`models.attention.chunks`).

Most of what a chunk saves depends on its own tokens. What is of the row so far does too: scores, where the layer's own
arithmetic has them; keys and values that are handed on; and, where torch's kernel runs, a mask of the chunk's queries
over them and, as transformers 5.23 has no other way with a mask, keys and values repeated for the queries that share
them. So the last chunk of a row, the shortest, may take more than the longest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate

from models.attention.chunks import BLOCK
from models.attention.kernels import EAGER
from models.spec import key_heads
from options.planner.inputs import Basis, layer_kinds
from options.planner.layer_costs import LayerCase, Saved, saved_by
from options.planner.row_chunks import carried_by
from training.config.precision import training_dtype

BACKWARD = 3  # tensors as large as the largest saved one that a backward pass allocates


def saved_tensors(basis: Basis) -> list[Saved]:
    """Return what autograd saves of each layer without recomputation; of chunks the longest one, amid its row."""
    whole, cuts = _saved(basis, basis.share.longest), basis.longest_chunks
    if len(cuts) == 1:
        return whole
    row, found = _ChunkedRow(basis), []
    middle = (max(cuts) + row.length) // 2
    for own, of_row, numbers in zip(_saved(basis, max(cuts)), whole, carried_numbers(basis), strict=True):
        mean = {name: int(row.between(each, vars(of_row)[name], middle)) for name, each in vars(own).items()}
        mask, repeated = row.of_keys(numbers, max(cuts), middle)
        found.append(replace(Saved(**mean), inside=mean["inside"] + mask + repeated))
    return found


def block_peaks(basis: Basis, again: frozenset[int]) -> list[int]:
    """Return most bytes that a chunk takes while it goes back through each layer.

    Args:
        again: layers that compute again what they would have saved, which counts then.
    """
    row, cuts = _ChunkedRow(basis), basis.longest_chunks
    chunks = list(zip(cuts, accumulate(cuts), strict=True))

    @cache  # layers are alike
    def most(alone: Saved, of_row: Saved, numbers: int, computes: bool) -> int:
        return max(row.going_back(alone, of_row, numbers, computes, *chunk) for chunk in chunks)

    layers = zip(_saved(basis, max(cuts)), _saved(basis, row.length), carried_numbers(basis), strict=True)
    return [most(*layer, number in again) for number, layer in enumerate(layers)]


def carried_numbers(basis: Basis) -> list[int]:
    """Return how many numbers the keys and values of the longest rows have in each layer, if chunks hand them on."""
    length = basis.share.longest
    if len(basis.longest_chunks) == 1:
        return [0] * basis.spec.n_layers
    return [length * basis.once(carried_by, case) for case in _cases(basis, 1)]


def _saved(basis: Basis, length: int) -> list[Saved]:
    return [basis.once(saved_by, case) for case in _cases(basis, length)]


def _cases(basis: Basis, length: int) -> list[LayerCase]:
    config = basis.config
    case = basis.share.rows, length, training_dtype(config), config.has_flash(basis.device.ampere)
    return [LayerCase(kind, *case, config.model_topo.tensor) for kind in layer_kinds(basis.spec)]


class _ChunkedRow:
    """The longest rows of a run in chunks."""

    def __init__(self, basis: Basis) -> None:
        self.length, self._longest = basis.share.longest, max(basis.longest_chunks)
        self._itemsize = training_dtype(basis.config).itemsize
        self._masked = not (basis.config.has_flash(basis.device.ampere) or basis.spec.attention[0] == EAGER)
        self._sharing = int(basis.spec.config.num_attention_heads) // key_heads(basis.spec.config)

    def between(self, alone: float, of_row: float, end: int) -> float:
        """Return what the longest chunk has that ends there.

        What grows with keys, as scores do, lies between what it has by itself and its share of what a whole row has.
        """
        more = of_row * self._longest / self.length - alone
        return alone + more * (end - self._longest) / (self.length - self._longest)

    def of_keys(self, numbers: int, tokens: int, end: int) -> tuple[int, int]:
        """Return the bytes of a chunk's masks in a layer, and of repeated keys and values."""
        if not numbers or not self._masked or tokens == end:  # a row's first chunk needs no mask
            return 0, 0
        repeated = -(-tokens // BLOCK) * self._repeated(numbers, end) if self._sharing > 1 else 0
        return tokens * end * self._itemsize, repeated

    def going_back(self, alone: Saved, of_row: Saved, numbers: int, computes: bool, tokens: int, end: int) -> int:
        """Return the bytes that a chunk takes in a layer's backward pass, with what it computes again.

        What lies behind attention goes back first, beside all that is saved; then attention, without the largest
        tensors, whose gradients of keys and values are of the row so far.
        """
        share, at = tokens / self._longest, max(end, self._longest)
        largest = BACKWARD * share * self.between(alone.largest, of_row.largest, at)
        inside = share * self.between(alone.inside, of_row.inside, at) if computes else 0
        mask, repeated = self.of_keys(numbers, tokens, end)

        beside = mask + repeated if computes else 0
        gradients = numbers * end // self.length * self._itemsize
        if repeated:
            gradients += self._repeated(numbers, end)
        return int(beside + max(inside + largest, max(0.0, inside - largest) + gradients))

    def _repeated(self, numbers: int, end: int) -> int:
        return numbers * end // self.length * self._sharing * self._itemsize
