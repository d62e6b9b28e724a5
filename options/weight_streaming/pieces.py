"""Update a process's pieces of all weights on the CPU, with no fp32 copy of a bf16 weight beside it.

Of an fp32 value the upper 16 bits, rounded, are the bf16 weight that is there anyway; the rest is a signed number of
16 bits. Both together are the value, to the bit. A tie is rounded away from zero, where a cast rounds to even: to even,
one weight and one rest would stand for two values. So one weight in about 131,072 has another last bit than a cast's.

An update joins one piece after the other, so whole fp32 values are there of one weight at a time. A checkpoint is read
into and written from the memory of the gradient sums, which is free between an update and the next step.

With `bf16.bf16_optimizer_states` states are bf16 between updates. They are rounded up or down by chance, so that small
changes of an average are not lost; chance is a function of the seed, the step, the weight and the place in it. So
neither a resumed run nor another number of processes changes a bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from options.weight_streaming.streamed_model import StreamedModel
from training.checkpoint.saved_slices import Slice

PAGE = 1024  # elements; pieces begin at multiples of it
OF_COUNT = 16  # numbers of 16 bits that Philox makes of one count
AT_ONCE = 2**20  # elements updated at a time: 4 MB of whole values


def piece_of(numel: int, process: int, processes: int) -> slice:
    """Return the piece of a weight of `numel` elements that a process updates.

    Vectorized kernels compute the elements after the last full vector by other code. Only the last piece has such
    elements, so the number of processes changes no bit.
    """
    pages = math.ceil(numel / PAGE)
    begin, end = (pages * each // processes * PAGE for each in (process, process + 1))
    return slice(begin, min(end, numel))


class Pieces:
    """The pieces of the trained weights that a process updates, in all dtypes.

    Args:
        tied: the names of a tied pair, if it is trained.
        process, processes: which pieces are its own.
        seed: of what rounds the optimizer's states to bf16; None if they stay fp32.

    Attributes:
        ranges: `<layer>.<name>` -> the piece of the flattened weight; of a tied pair the first.
        masters: the same -> what the optimizer updates. Of a bf16 weight its values are there between `join` and
            `split` alone.
    """

    def __init__(
        self, model: StreamedModel, tied: Sequence[str], process: int, processes: int, seed: int | None
    ) -> None:
        self._model, self._tied, self._seed = model, tied, seed
        names = [name for name in model.sums if name not in tied[1:]]
        self.ranges = {name: piece_of(model.sums[name].numel(), process, processes) for name in names}
        self.masters: dict[str, nn.Parameter] = {}
        self._rests: dict[str, Tensor] = {}
        for name in names:
            (weight, *_), places = self._of(name, model.weights), self._of(name, model.sums)
            if weight.dtype != torch.bfloat16:  # in fp32 the optimizer updates the shared memory itself
                self.masters[name] = nn.Parameter(weight.float())
                continue
            self.masters[name] = nn.Parameter(places[0].copy_(weight))
            self._rests[name] = torch.empty(len(weight), dtype=torch.int16)
        self._joined = True
        self._names = {master: name for name, master in self.masters.items()}

    def gradient(self, name: str, piece: slice = slice(None)) -> Tensor:
        """Return a piece of the flattened gradient of a weight; of a tied one the sum over both ends."""
        sums = [self._model.sums[end].view(-1)[piece] for end in self._ends(name)]
        return torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]

    def slices(self, optimizer: torch.optim.Optimizer) -> list[Slice]:
        """List the pieces with the optimizer's states, in its order, for a checkpoint; their values are whole."""
        self.join()
        found = []
        for master in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            name = self._names[master]
            begin, state = self.ranges[name].start, optimizer.state[master]
            found.append(Slice(name, begin, master.numel(), master, 0, state, states_in=self._states_in(name)))
        return found

    @torch.no_grad()
    def join(self) -> None:
        """Put whole fp32 values where gradients were summed; no process may be in a step."""
        for name in self._rests if not self._joined else ():
            for weight, rest, values in self._parts(name):
                values.copy_(join(weight, rest))
        self._joined = True

    @torch.no_grad()
    def split(self) -> None:
        """Take whole fp32 values from there, before a step."""
        for name in self._rests if self._joined else ():
            for weight, rest, values in self._parts(name):
                split(values, weight, rest)
            self._store(name)
        self._joined = False

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Update all pieces, of which `masters` have the gradients, and write the weights."""
        groups = optimizer.param_groups
        for group in groups:
            for master in (each for each in group["params"] if each.grad is not None):
                name = self._names[master]
                if name in self._rests:
                    self._update_in_parts(optimizer, group, name, step)
                else:
                    optimizer.param_groups = [group | {"params": [master]}]
                    optimizer.step()
                    self._store(name, master.data)
                master.grad = None
        optimizer.param_groups = groups

    def _update_in_parts(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], name: str, step: int) -> None:
        """Join, update and split one part of a piece after the other, so that whole values stay in a core's cache."""
        master, state = self.masters[name], optimizer.state[self.masters[name]]
        assert master.grad is not None
        before = dict(state)
        for number, (weight, rest, _) in enumerate(self._parts(name)):
            part = slice(number * AT_ONCE, (number + 1) * AT_ONCE)
            joined = nn.Parameter(join(weight, rest))
            joined.grad = master.grad[part]
            optimizer.state[joined] = {key: _of_part(value, part) for key, value in before.items()}
            optimizer.param_groups = [group | {"params": [joined]}]
            optimizer.step()
            split(joined.data, weight, rest)

            for key, value in optimizer.state.pop(joined).items():
                if not _is_average(value):
                    state[key] = value  # a count of updates, the same for all parts
                    continue
                if key not in state:
                    state[key] = torch.empty_like(master, dtype=self._states_in(name))
                kept = state[key][part]
                if kept.dtype == torch.bfloat16:
                    begin = self.ranges[name].start + part.start
                    kept.copy_(rounded_by_chance(value, f"{self._seed} {step} {name} {key}", begin))
                elif kept.data_ptr() != value.data_ptr():  # else it was updated in place
                    kept.copy_(value)
        self._store(name)

    def _store(self, name: str, values: Tensor | None = None) -> None:
        """Write a weight's values, if they are not there yet; at the other end too, if it is tied."""
        first, *others = self._of(name, self._model.weights)
        if values is not None:
            first.copy_(values)
        for other in others:
            other.copy_(first)

    def _states_in(self, name: str) -> torch.dtype:
        return torch.float32 if self._seed is None or name not in self._rests else torch.bfloat16

    def _parts(self, name: str) -> Iterator[tuple[Tensor, ...]]:
        """Yield parts of a weight, of its rests, and of the place of its whole values."""
        tensors = self._of(name, self._model.weights)[0], self._rests[name], self.masters[name].data
        yield from zip(*(tensor.split(AT_ONCE) for tensor in tensors), strict=True)

    def _of(self, name: str, tensors: dict[str, Tensor]) -> list[Tensor]:
        return [tensors[end].view(-1)[self.ranges[name]] for end in self._ends(name)]

    def _ends(self, name: str) -> Sequence[str]:
        return self._tied if name in self._tied else (name,)


def _is_average(state: Any) -> bool:
    return isinstance(state, Tensor) and state.dim() > 0


def _of_part(state: Any, part: slice) -> Any:
    """Return a part of an optimizer's average in fp32, or a copy of its count."""
    return state[part].float() if _is_average(state) else deepcopy(state)


def join(weight: Tensor, rest: Tensor) -> Tensor:
    """Return the fp32 values of a bf16 weight and its rests, all of shape [n]."""
    return weight.view(torch.int16).int().bitwise_left_shift_(16).add_(rest).view(torch.float32)


def split(values: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Write the bf16 weight and the rests of fp32 values, all of shape [n]."""
    bits = values.view(torch.int32)
    rounded = bits.add(2**15).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(rounded)
    rest.copy_(bits - rounded.bitwise_left_shift_(16))


def rounded_by_chance(values: Tensor, source: str, begin: int) -> Tensor:
    """Round fp32 values [n] to bf16, up as often as they are near to it.

    Args:
        source: what chance depends on; Philox (Salmon et al., 2011) makes numbers of its digest and of a count.
        begin: the place of the first value, a multiple of `PAGE`: the count goes on where another part's ends.
    """
    key = int.from_bytes(hashlib.blake2b(source.encode(), digest_size=16).digest(), "little")
    chance = numpy.random.Philox(key=key, counter=begin // OF_COUNT)
    numbers = chance.random_raw(math.ceil(len(values) / 4)).view(numpy.uint16)[: len(values)]
    added = torch.from_numpy(numbers.astype(numpy.int32)).add_(values.view(torch.int32))
    return added.bitwise_right_shift_(16).short().view(torch.bfloat16)
