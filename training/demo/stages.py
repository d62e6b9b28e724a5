"""Generate in several processes: each holds a stage of the model, or with `--tensor-parallel` a share of every layer.

Rank 0 holds the last stage, with the head: it reads questions, chooses tokens and writes as a single process does. It
sends each pass to all others as a line of JSON, by gloo; hidden states go from rank to rank down to it, by NCCL on
GPUs. There are as many groups of rows as stages: while one stage computes for one group, the others compute for the
others.

Cost: a pass reads a stage's weights once, whatever its number of rows. So several stages answer more prompts at once,
but not one prompt sooner.
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
from training.distributed.communication import wait
from training.distributed.processes import ProcessInfo, agreed
from training.distributed.rank_monitor import RankMonitor
from training.errors import INTERRUPTED, USER_ERRORS, ConfigError
from training.plan.partition import best_split, layer_ranges

PATIENCE = timedelta(days=20)  # for the next question; torch counts milliseconds in 31 bits
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPORTED = 10  # seconds from a failure until all ranks have learned of it


class StagedPasses(Passes):
    """Passes through stages, of which rank 0 holds the last; all ranks make it together."""

    def __init__(self, model: CausalLM, process: ProcessInfo, groups: int | None = None) -> None:
        super().__init__(model, groups or process.world_size)
        self._rank, self._first_stage = process.rank, process.world_size - 1
        self._requests = distributed.new_group(backend="gloo")
        self._sent: deque[list[Any]] = deque()
        self._handed_on: Any = None

    def give(self, work: Pass) -> None:
        """Queue a pass here and on all other ranks.

        Raises:
            CheckpointError: the model does not know a token.
        """
        super().give(work)
        self._send_request(work)

    def forget(self) -> None:
        while self._queue:
            self.inputs(self._queue.popleft())

    def inputs(self, work: Pass) -> Tensor:
        """Return token ids, or receive the hidden states of the stage before."""
        self._wait_for_request()
        if self._rank == self._first_stage:
            return super().inputs(work)
        shape = len(work.texts), len(work.texts[0]), self.spec.config.hidden_size
        hidden = self._weight.new_empty(shape)
        distributed.recv(hidden, self._rank + 1)
        return hidden

    @torch.inference_mode()
    def follow(self) -> None:
        """Compute what rank 0 requests, until it ends."""
        while (work := self._receive_request()) is not None:
            self.hand_on(self.compute(work).contiguous())

    def hand_on(self, hidden: Tensor) -> None:
        """Send the output to the next stage."""
        wait(self._handed_on)
        self._handed_on = distributed.isend(hidden, self._rank - 1)

    def end(self) -> None:
        """Let the other ranks leave."""
        self.forget()
        self._send_request(None)
        self._wait_for_request()

    def _send_request(self, work: Pass | None) -> None:
        content = torch.frombuffer(bytearray(json.dumps(work).encode()), dtype=torch.uint8)
        parts = torch.tensor([len(content)]), content
        ranks = range(1, self._first_stage + 1)
        self._sent.append([distributed.isend(part, rank, self._requests) for rank in ranks for part in parts])

    def _wait_for_request(self) -> None:
        """Wait until all have received the oldest request."""
        for each in self._sent.popleft() if self._sent else ():
            wait(each)

    def _receive_request(self) -> Pass | None:
        size = torch.empty(1, dtype=torch.int64)
        distributed.recv(size, 0, self._requests)
        content = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(content, 0, self._requests)
        request = json.loads(content.numpy().tobytes())
        return Pass(*request) if request else None


class TensorParallelPasses(StagedPasses):
    """Passes through shares of every layer (`models.api.load_share`): all ranks compute the same pass."""

    def __init__(self, model: CausalLM, process: ProcessInfo) -> None:
        super().__init__(model, process, groups=1)

    def forget(self) -> None:
        while self._queue:  # the others compute it, and sum with this rank
            self.hand_on(self.compute(self._queue.popleft()))

    def inputs(self, work: Pass) -> Tensor:
        self._wait_for_request()
        return Passes.inputs(self, work)

    def hand_on(self, hidden: Tensor) -> None:
        """Gather the logits, of which each rank has a share."""
        self.logits(hidden)


def run_rank(
    arguments: Namespace, dtype: torch.dtype | None, process: ProcessInfo, answer: Callable[[StagedPasses], None]
) -> None:
    """Be one of the processes that hold a model together.

    Args:
        arguments: the parsed command line.
        answer: what rank 0 does with the model.
    """
    processes.join(process, PATIENCE)
    everyone = distributed.group.WORLD
    assert everyone
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    failure, shares = None, arguments.tensor_parallel
    with RankMonitor(process, 0 if shares else stage_of(process), timeout_minutes=0):
        handle_signals(process)
        with agreed():
            model = (
                load_share(arguments.model, everyone, dtype, DEVICE)
                if shares
                else load_stage(arguments.model, dtype, process)
            )
        passes = TensorParallelPasses(model, process) if shares else StagedPasses(model, process)
        if process.rank:
            passes.follow()
        else:
            try:
                answer(passes)
            except USER_ERRORS as error:
                failure = error
            passes.end()
    if failure:
        raise failure


def handle_signals(process: ProcessInfo) -> None:
    """End at Ctrl-C; at SIGTERM later, as another rank's failure may have caused it."""

    def leave_at_once(*_: object) -> None:
        if process.rank == 0:
            processes.print_to_stderr("error: interrupted")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave_at_once)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(REPORTED))


def stage_of(process: ProcessInfo) -> int:
    """Return the stage that a process holds."""
    return process.world_size - 1 - process.rank


def load_stage(folder: str | Path, dtype: torch.dtype | None, process: ProcessInfo) -> CausalLM:
    """Load the layers of this process's stage."""
    ranges = layer_ranges(divide(read_spec(resolve(folder)), process.world_size))
    return load_model(folder, dtype, DEVICE, range(*ranges[stage_of(process)]))


def divide(spec: ModelSpec, stages: int) -> list[int]:
    """Divide the layers so that the largest stage has the fewest weights: a pass takes as long as reading them does."""
    weights = [sum(shape.numel() for shape in spec.shapes(layer).values()) for layer in range(spec.n_layers)]
    parts = best_split(weights, stages, lambda *_: True)
    if parts is None:
        raise ConfigError(
            f"{stages} processes for a model of {spec.n_layers} layers (embedding, {spec.n_blocks} blocks and head); "
            f"expected at most {spec.n_layers}"
        )
    return parts
