"""Sequence parallelism: neighbouring processes share rows of tokens that are too long for one.

A block works on the process's own tokens. In attention, where tokens meet, the processes exchange tokens for heads
(all-to-all): each gets all tokens of its heads, runs any kernel on whole rows, and exchanges the result back
(arXiv:2309.14509). So documents, windows, masks and biases are those of whole rows, and no number changes but by the
rounding of sums over processes.

`share_attention` wraps each of transformers' attention kernels once; a block passes `part_of_rows` to the wrapper. A
family whose tokens meet elsewhere too, as in linear attention, would compute something else; `models.derived.proof`
finds out.

Cost: with n processes, four exchanges a block (queries, keys, values, the result), as many in the backward pass and,
where the block recomputes, four more; each sends (n - 1) / n of a process's tensor. Fewer key heads than processes are
repeated first. A block keeps for the backward pass what its tokens need, and attention's result twice; a mask, for the
kernels that need one, is still that of the whole row.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.attention.kernels import ALL, EAGER
from models.attention.packed import Documents
from models.parallel.groups import RankGroup, add_up, communicate

Kernel = Callable[..., tuple[Tensor, Any]]  # as transformers calls attention


class PartOfRows(ABC):
    """This process's tokens of each row, and how attention reaches the others."""

    @abstractmethod
    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Take the own tokens of something for whole rows; `dim`, negative, counts tokens."""

    @abstractmethod
    def attend(
        self, kernel: Kernel, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        """Run a kernel on whole rows: own tokens [B, heads, S / n, D] to [B, S / n, heads, D]."""

    @abstractmethod
    def summed(self, own: Tensor) -> Tensor:
        """Sum over all parts of the rows; the backward pass gives each part the gradient of its own tokens."""

    def mix(
        self,
        mixer: nn.Module,
        together: Callable[..., Tensor],
        hidden: Tensor,
        documents: Documents | None,
        **options: Any,
    ) -> Tensor:
        """Run linear attention on whole rows: own tokens [B, S / n, H] to [B, S / n, H].

        Args:
            mixer: the module that mixes tokens.
            together: its forward pass.
        """
        raise NotImplementedError("states of linear attention do not pass between processes")


@dataclass(frozen=True)
class Exchanged(PartOfRows):
    """The part of one process of a group."""

    ranks: RankGroup

    def own(self, whole: Tensor, dim: int) -> Tensor:
        tokens = self.ranks.part(whole.shape[dim])
        # Not `contiguous`: of a single row that is a view, which would keep the whole.
        return whole.narrow(dim, tokens.start, tokens.stop - tokens.start).clone(memory_format=torch.contiguous_format)

    def attend(
        self, kernel: Kernel, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        heads = query.shape[1]
        key, value = (self._repeated(each, heads) for each in (key, value))
        changed: dict[str, Any] = {"num_key_value_groups": heads // key.shape[1]}
        if isinstance(sinks := getattr(module, "sinks", None), Tensor):  # of each head, as GPT-OSS has them
            changed["sinks"] = sinks[self.ranks.part(heads)]
        if options.get("s_aux") is not None:
            options["s_aux"] = options["s_aux"][self.ranks.part(heads)]
        whole = (_exchanged(each, self.ranks, 1, 2) for each in (query, key, value))
        output, _ = kernel(_Changed(module, changed), *whole, mask, **options)
        return _exchanged(output, self.ranks, 1, 2)

    def summed(self, own: Tensor) -> Tensor:
        # As each rank goes on with the sum, and each step averages over them, the gradient counts once for each.
        return communicate(
            own, lambda own: add_up(own.clone(), self.ranks), lambda gradient: gradient * self.ranks.size
        )

    def _repeated(self, keys: Tensor, heads: int) -> Tensor:
        """Repeat key heads until they divide evenly, each beside its queries."""
        count, size = keys.shape[1], self.ranks.size
        times = size // math.gcd(size, count)
        if heads // count % times:
            times = heads // count
        return keys if times == 1 else keys.repeat_interleave(times, dim=1)


@dataclass(frozen=True)
class Folded(PartOfRows):
    """Simulate all parts in one process, as rows of their own.

    By it a single process sees whether a model whose rows are shared computes what it computes with whole rows.
    """

    parts: int

    def own(self, whole: Tensor, dim: int) -> Tensor:
        return whole.unflatten(dim, (self.parts, -1)).flatten(dim - 2, dim - 1)

    def attend(
        self, kernel: Kernel, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        whole = (each.unflatten(0, (-1, self.parts)).movedim(1, 2).flatten(2, 3) for each in (query, key, value))
        output, _ = kernel(module, *whole, mask, **options)
        return output.unflatten(1, (self.parts, -1)).flatten(0, 1)

    def summed(self, own: Tensor) -> Tensor:
        return own


class _Changed:
    """A module with some attributes of other values, as a kernel sees it."""

    def __init__(self, module: nn.Module, changed: dict[str, Any]) -> None:
        vars(self).update(changed, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


def _exchanged(tensor: Tensor, ranks: RankGroup, split: int, joined: int) -> Tensor:
    """Send a part of dimension `split` to each other rank, and join theirs in dimension `joined`."""
    return communicate(
        tensor,
        lambda tensor: _exchange(tensor, ranks, split, joined),
        lambda gradient: _exchange(gradient, ranks, joined, split),
    )


def _exchange(tensor: Tensor, ranks: RankGroup, split: int, joined: int) -> Tensor:
    sent = tensor.unflatten(split, (ranks.size, -1)).movedim(split, 0).contiguous()
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=ranks.group)
    return received.movedim(0, joined).flatten(joined, joined + 1)


def over_parts(kernel: Kernel) -> Kernel:
    """Wrap a kernel so that it reaches whole rows where it gets `part_of_rows`."""

    @wraps(kernel)
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        part_of_rows: PartOfRows | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        if part_of_rows is None:
            return kernel(module, query, key, value, attention_mask, **options)
        exchange: Callable[..., Tensor] = torch.compiler.disable(part_of_rows.attend)
        return exchange(kernel, module, query, key, value, attention_mask, **options), None

    return attend


def share_attention() -> None:
    """Let every attention kernel of this process understand `part_of_rows`."""
    if EAGER in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return
    for name in ALL:
        if name in ALL_ATTENTION_FUNCTIONS.valid_keys():
            ALL_ATTENTION_FUNCTIONS.register(name, over_parts(ALL_ATTENTION_FUNCTIONS[name]))
    ALL_ATTENTION_FUNCTIONS.register(EAGER, over_parts(_own_arithmetic))


def _own_arithmetic(module: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
    """Find the attention function beside a layer's class, for those without an entry."""
    kind = type(vars(module)["_module"] if isinstance(module, _Changed) else module)
    found: tuple[Tensor, Any] = vars(sys.modules[kind.__module__])["eager_attention_forward"](
        module, *arguments, **options
    )
    return found
