"""Bugs that are easily made, planted on purpose: the pretend device has to see them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from deepspeed.utils.timer import SynchronizedWallClockTimer
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import models.layers
import models.loss.lean
import models.loss.micro_batch
import models.offload
import models.router
import training.engine.pipeline
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
def reading_a_number_in_each_block() -> Iterator[None]:
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
    prefetch = training.engine.trainer.prefetch
    with patch.object(training.engine.trainer, "prefetch", lambda each, device: prefetch(each, torch.device("cpu"))):
        yield


@contextmanager
def positions_not_found_ahead() -> Iterator[None]:
    """Supervised positions that the loss has to find on the device."""
    loss = models.loss.micro_batch.token_loss

    def find(*args: Any) -> Tensor:
        return loss(*args[:4])

    with patch.object(models.loss.micro_batch, "token_loss", find):
        yield


def _blocking(function: Callable[..., Any], tree: Any) -> Any:
    return tree_map(lambda tensor: tensor.to("cuda"), tree)


class Planted(NamedTuple):
    """A bug, and the model and config where it matters.

    Attributes:
        seen: the beginning of a line that reports it.
    """

    bug: Bug
    seen: str
    model: str = "llama-tied"
    keys: dict[str, Any] = {}


COPY = "step: wait: copy from host to device"
PLANTED = {
    "slopes left on the host": Planted(
        lambda: patch.object(Positions, "slopes_on", lambda self, device: self.slopes),
        "step: mismatch: aten.mul",
        "bloom",
    ),
    "slopes copied each time": Planted(
        lambda: patch.object(Positions, "slopes_on", lambda self, to: self.slopes.to(to)),
        f"{COPY}, 4 times, models/",
        "bloom",
    ),
    "rotary left on the host": Planted(lambda: patch.object(nn.Module, "to", lambda self, *_, **__: self), "step: "),
    "router sums on the host": Planted(
        lambda: patch.object(models.layers, "torch", OnTheHost("zeros")),
        "step: mismatch: aten.add",
        "mixtral",
        {"aux_router_loss": {"weight": 0.5}},
    ),
    "loss summed on the host": Planted(
        lambda: patch.object(models.loss.lean, "torch", OnTheHost("zeros")), "step: mismatch"
    ),
    "a number read in each block": Planted(reading_a_number_in_each_block, "step: wait: item"),
    "documents not expected": Planted(
        lambda: patch.object(Positions, "expect", lambda self, documents: None),
        "step: wait: tolist, 4 times, models/attention/packed.py",
    ),
    "trained positions not found ahead": Planted(
        positions_not_found_ahead, "step: wait: nonzero, 4 times, models/loss/interface.py"
    ),
    "tokens chosen by a mask": Planted(chosen_by_a_mask, "step: wait: index by a mask"),
    "micro-batches not sent": Planted(not_sent, f"{COPY}, 24 times"),
    "copied without pinning": Planted(
        lambda: patch.object(Tensor, "pin_memory", lambda self: self), f"{COPY} of memory that is not pinned"
    ),
    "copied and waited for": Planted(lambda: patch.object(training.engine.trainer, "tree_map", _blocking), COPY),
    "offload waits for the copy back": Planted(
        lambda: patch.object(models.offload.HostCopy, "back", lambda self: self._copy.to(self._device)),
        "step: wait: copy from pinned host to device",
        keys={"offload_activations": True},
    ),
    "an expert at a time": Planted(
        lambda: patch("models.api.experts_implementation", lambda: "eager"), "step: wait: ", "mixtral"
    ),
    "a host tensor in an all-reduce": Planted(summed_on_the_host, "step: refused: allreduce_ of a CPU tensor"),
    "the timer is kept": Planted(
        lambda: patch("training.engine.stage_engine.NoopTimer", SynchronizedWallClockTimer), "2 events"
    ),
}
