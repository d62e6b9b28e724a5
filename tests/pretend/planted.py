"""Bugs that are planted on purpose, of kinds that are easily made: the pretence has to see them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.utils.timer import SynchronizedWallClockTimer
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import models.layers
import models.lean_loss
import models.loss
import models.offload
import models.router
import training.engine.pipeline
import training.engine.prefetch
import training.engine.trainer
from models.attention.positions import Positions

Bug = Callable[[], AbstractContextManager[Any]]


class OnTheHost:
    """torch, for a module that forgets on which device it makes its tensors."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, partial(self._make, getattr(torch, name)))

    def _make(self, real: Callable[..., Tensor], *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return real(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def looking_at_each_block() -> Iterator[None]:
    """A block that asks for a number of its input, as debugging code does."""
    forward = models.layers.Block.forward

    def look(block: Any, stream: Any, cache: Any = None) -> Any:
        assert stream[0].sum().item() == stream[0].sum().item()
        return forward(block, stream, cache)

    with patch.object(models.layers.Block, "forward", look):
        yield


@contextmanager
def chosen_by_a_mask() -> Iterator[None]:
    """Supervised tokens that are picked by a boolean mask."""
    index_select = Tensor.index_select

    def pick(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
        mask = torch.zeros(len(tensor), dtype=torch.bool, device=tensor.device).index_fill(0, index, True)
        return tensor[mask] if dim == 0 else index_select(tensor, dim, index)

    with patch.object(Tensor, "index_select", pick):
        yield


@contextmanager
def summed_on_the_host() -> Iterator[None]:
    """A number of this process's own that goes into an all-reduce as it is."""
    step = training.engine.pipeline.PipelineTrainer.train_step

    def step_and_sum(trainer: Any, *args: Any) -> float:
        torch.distributed.all_reduce(torch.ones(1))
        return step(trainer, *args)

    with patch.object(training.engine.pipeline.PipelineTrainer, "train_step", step_and_sum):
        yield


@contextmanager
def not_sent() -> Iterator[None]:
    """Micro-batches that stay on the host."""
    prefetch = training.engine.prefetch.prefetch
    with patch.object(training.engine.trainer, "prefetch", lambda each, device: prefetch(each, torch.device("cpu"))):
        yield


@contextmanager
def positions_not_found_ahead() -> Iterator[None]:
    """Supervised positions that the loss has to find on the device."""
    loss = models.loss.token_loss

    def find(*args: Any) -> Tensor:
        return loss(*args[:4])

    with patch.object(models.loss, "token_loss", find):
        yield


def _blocking(function: Callable[..., Any], tree: Any) -> Any:
    return tree_map(lambda tensor: tensor.to("cuda"), tree)


BUGS: dict[str, Bug] = {
    "slopes left on the host": lambda: patch.object(Positions, "slopes_on", lambda self, device: self.slopes),
    "slopes copied each time": lambda: patch.object(Positions, "slopes_on", lambda self, to: self.slopes.to(to)),
    "rotary left on the host": lambda: patch.object(nn.Module, "to", lambda self, *_, **__: self),
    "router sums on the host": lambda: patch.object(models.layers, "torch", OnTheHost("zeros")),
    "loss summed on the host": lambda: patch.object(models.lean_loss, "torch", OnTheHost("zeros")),
    "a number asked of each block": looking_at_each_block,
    "documents not told": lambda: patch.object(Positions, "expect", lambda self, documents: None),
    "supervised positions not told": positions_not_found_ahead,
    "tokens chosen by a mask": chosen_by_a_mask,
    "micro-batches not sent": not_sent,
    "copied without pinning": lambda: patch.object(Tensor, "pin_memory", lambda self: self),
    "copied and waited for": lambda: patch.object(training.engine.prefetch, "tree_map", _blocking),
    "offload waits for the way back": lambda: patch.object(
        models.offload.HostCopy, "back", lambda self: self._copy.to(self._device)
    ),
    "an expert at a time": lambda: patch("models.api.experts_implementation", lambda: "eager"),
    "a host tensor in an all-reduce": summed_on_the_host,
    "the timer is kept": lambda: patch("training.engine.stage_engine.NoopTimer", SynchronizedWallClockTimer),
}
