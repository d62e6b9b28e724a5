"""Generate in stages: each process holds some neighbouring layers.

Rank 0 holds the last layers with the head: it reads, chooses tokens and writes as a single process does. It tells all
others of each pass in a line of JSON, by gloo; hidden states go from rank to rank down to it, by NCCL where there are
GPUs. As many groups of rows as there are stages take turns, so that each stage computes for one group while the others
compute for the others. With `--tensor-parallel` each holds a share of every layer instead (`Together`).

Cost: a pass reads a stage's weights once however many rows it has, so that several stages answer more at once rather
than one text sooner.
"""

from __future__ import annotations

import json
import os
import signal
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from models import CausalLM, load_model
from models.api import load_share, read_spec
from models.checkpoint.layout import resolve
from models.generation import Pass, Passes
from models.spec import ModelSpec
from training.distributed import processes
from training.distributed.communication_wait import wait
from training.distributed.processes import Place, agreed
from training.distributed.rank_monitor import RankMonitor
from training.errors import INTERRUPTED, USER_ERRORS, ConfigError
from training.plan.partition import best_split, layer_ranges

PATIENCE = timedelta(days=20)  # for the next question; torch counts milliseconds in 31 bits
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAILURE_TOLD = 10  # seconds from a failure until all have left that hear of it


class Pipeline(Passes):
    """One stage of the model, of which rank 0 has the last; all ranks make it together."""

    def __init__(self, model: CausalLM, place: Place, groups: int | None = None) -> None:
        super().__init__(model, groups or place.world_size)
        self._rank, self._last_rank = place.rank, place.world_size - 1
        self._told = distributed.new_group(backend="gloo")
        self._sent: deque[list[Any]] = deque()
        self._handed_on: Any = None

    def give(self, work: Pass) -> None:
        """Ask all stages for a pass.

        Raises:
            CheckpointError: the model does not know a token.
        """
        super().give(work)
        self._tell(work)

    def forget(self) -> None:
        while self._queue:
            self.inputs(self._queue.popleft())

    def inputs(self, work: Pass) -> Tensor:
        """Take token ids, or hidden states of the stage before."""
        self._wait()
        if self._rank == self._last_rank:
            return super().inputs(work)
        shape = len(work.texts), len(work.texts[0]), self.spec.config.hidden_size
        hidden = self._weight.new_empty(shape)
        distributed.recv(hidden, self._rank + 1)
        return hidden

    @torch.inference_mode()
    def follow(self) -> None:
        """Compute what rank 0 sends, until it ends."""
        while (work := self._hear()) is not None:
            self.hand_on(self.compute(work).contiguous())

    def hand_on(self, hidden: Tensor) -> None:
        """Send the output to the next stage."""
        wait(self._handed_on)
        self._handed_on = distributed.isend(hidden, self._rank - 1)

    def end(self) -> None:
        """Let the others leave."""
        self.forget()
        self._tell(None)
        self._wait()

    def _tell(self, work: Pass | None) -> None:
        content = torch.frombuffer(bytearray(json.dumps(work).encode()), dtype=torch.uint8)
        parts = torch.tensor([len(content)]), content
        ranks = range(1, self._last_rank + 1)
        self._sent.append([distributed.isend(part, rank, self._told) for rank in ranks for part in parts])

    def _wait(self) -> None:
        """Wait until the first message has been received by all."""
        for each in self._sent.popleft() if self._sent else ():
            wait(each)

    def _hear(self) -> Pass | None:
        size = torch.empty(1, dtype=torch.int64)
        distributed.recv(size, 0, self._told)
        content = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(content, 0, self._told)
        told = json.loads(content.numpy().tobytes())
        return Pass(*told) if told else None


class Together(Pipeline):
    """A share of every layer (`models.api`): all ranks compute the same pass."""

    def __init__(self, model: CausalLM, place: Place) -> None:
        super().__init__(model, place, groups=1)

    def forget(self) -> None:
        while self._queue:  # the others compute it, and sum with this one
            self.hand_on(self.compute(self._queue.popleft()))

    def inputs(self, work: Pass) -> Tensor:
        """Take token ids."""
        self._wait()
        return Passes.inputs(self, work)

    def hand_on(self, hidden: Tensor) -> None:
        """Gather the logits; each rank has those of some words."""
        self.logits(hidden)


def in_processes(
    arguments: Namespace, dtype: torch.dtype | None, place: Place, answer: Callable[[Pipeline], None]
) -> None:
    """Run one of the processes that hold a model together.

    Args:
        arguments: the words after demo.py.
        answer: what rank 0 does with it.
    """
    processes.join(place, PATIENCE)
    everyone = distributed.group.WORLD
    assert everyone
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    failure, shares = None, arguments.tensor_parallel
    with RankMonitor(place, 0 if shares else stage_of(place), timeout_minutes=0):
        obey_signals(place)
        with agreed():
            if shares:
                model = load_share(arguments.model, everyone, dtype, DEVICE)
            else:
                model = load_stage(arguments.model, dtype, place)
        pipeline = Together(model, place) if shares else Pipeline(model, place)
        if place.rank:
            pipeline.follow()
        else:
            try:
                answer(pipeline)
            except USER_ERRORS as error:
                failure = error
            pipeline.end()
    if failure:
        raise failure


def obey_signals(place: Place) -> None:
    """End at Ctrl-C; at SIGTERM later, as another failure may cause it."""

    def leave_at_once(*_: object) -> None:
        if place.rank == 0:
            processes.print_to_stderr("error: interrupted")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave_at_once)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(FAILURE_TOLD))


def stage_of(place: Place) -> int:
    """Return the stage that a process holds."""
    return place.world_size - 1 - place.rank


def load_stage(folder: str | Path, dtype: torch.dtype | None, place: Place) -> CausalLM:
    """Load the layers of this process's stage.

    Raises:
        CheckpointError: see `load_model`.
        ConfigError: there are fewer layers than stages.
    """
    ranges = layer_ranges(divide(read_spec(resolve(folder)), place.world_size))
    return load_model(folder, dtype, DEVICE, range(*ranges[stage_of(place)]))


def divide(spec: ModelSpec, stages: int) -> list[int]:
    """Divide the layers so that the largest stage is as small as possible.

    A pass takes about as long as reading the weights does.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    weights = [sum(shape.numel() for shape in spec.shapes(layer).values()) for layer in range(spec.n_layers)]
    parts = best_split(weights, stages, lambda *_: True)
    if parts is None:
        raise ConfigError(
            f"{stages} processes for a model of {spec.n_layers} layers (embedding, {spec.n_blocks} blocks and head); "
            f"expected at most {spec.n_layers}"
        )
    return parts
