"""Generate in several processes: each holds a stage of the model, or with `--tensor-parallel N` one of N shares of it.

Rank 0 holds the last stage, with the head: it reads questions, chooses tokens and writes as a single process does. It
sends each pass to all others as a line of JSON, by gloo; hidden states go from stage to stage down to it, by NCCL on
GPUs. The ranks that share a stage follow each other, so that they are on one host; they compute the same pass, and each
receives from the rank with the same share. There are as many groups of rows as stages: while one stage computes for one
group, the others compute for the others.

With `--parts` there may be more processes than stages: each further set of them is a replica, with groups of its own.
Rank 0 chooses the tokens of all; the last stage of another replica sends it the logits.

Cost: a pass reads a stage's weights once, whatever its number of rows. So several stages answer more prompts at once,
but not one prompt sooner.
"""

from __future__ import annotations

import json
import math
import os
import signal
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from common.quantities import counted
from models.api import CausalLM, load_model, load_share, read_spec
from models.checkpoint.hub import find_model
from models.spec import ModelSpec
from options.demo.generation import Pass, Passes
from options.planner.partition import best_split
from training.distributed import joining
from training.distributed.communication import wait
from training.distributed.processes import ProcessInfo, agreed, gather
from training.distributed.rank_monitor import RankMonitor
from training.errors import INTERRUPTED, USER_ERRORS, ConfigError, print_to_stderr
from training.topology import layer_ranges

PATIENCE = timedelta(days=20)  # for the next question; torch counts milliseconds in 31 bits
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPORTED = 10  # seconds from a failure until all ranks have learned of it


class StagedPasses(Passes):
    """Passes through stages, of which rank 0 holds the last; all ranks make it together.

    Args:
        shares: how many ranks hold each stage together (`models.api.load_share`).
        own: this rank's place in its replica (`in_replica`); without it all ranks are one.
    """

    def __init__(self, model: CausalLM, process: ProcessInfo, shares: int = 1, own: ProcessInfo | None = None) -> None:
        super().__init__(model, process.world_size // shares)
        own = own or process
        self._rank, self._size, self._shares = own.rank, own.world_size, shares
        self._first, self._world_size = process.rank - own.rank, process.world_size
        self._requests = distributed.new_group(backend="gloo")
        self._sent: deque[list[Any]] = deque()
        self._handed_on: Any = None

    def give(self, work: Pass) -> None:
        """Queue a pass here and on all other ranks of its replica.

        Raises:
            CheckpointError: the model does not know a token.
        """
        super().give(work)
        first = self._first_rank_of(work)
        self._send_request(work, range(max(1, first), first + self._size))

    @torch.inference_mode()
    def forget(self) -> None:
        while self._queue:
            work = self._queue.popleft()
            if self._first_rank_of(work):
                self.logits_of(work)
            elif self._shares > 1:  # the others of this stage compute it, and sum with this rank
                self.hand_on(self.compute(work))
            else:
                self.inputs(work)

    def logits_of(self, work: Pass) -> Tensor:
        """Compute a pass, or receive its logits from the replica that does."""
        if not (first := self._first_rank_of(work)):
            return super().logits_of(work)
        self._wait_for_request()
        logits = self._weight.new_empty(len(work.texts), self.spec.config.vocab_size, dtype=torch.float32)
        distributed.recv(logits, first)
        return logits

    def _first_rank_of(self, work: Pass) -> int:
        """Find the replica of a group; neighbours are on different ones, so that few prompts occupy all."""
        return work.group % (self._world_size // self._size) * self._size

    def inputs(self, work: Pass) -> Tensor:
        """Return token ids, or receive the hidden states of the stage before."""
        self._wait_for_request()
        if self._rank + self._shares >= self._size:
            return super().inputs(work)
        shape = len(work.texts), len(work.texts[0]), self.spec.config.hidden_size
        hidden = self._weight.new_empty(shape)
        distributed.recv(hidden, self._first + self._rank + self._shares)
        return hidden

    @torch.inference_mode()
    def follow(self) -> None:
        """Compute what rank 0 requests, until it ends."""
        while (work := self._receive_request()) is not None:
            self.hand_on(self.compute(work).contiguous())

    def hand_on(self, hidden: Tensor) -> None:
        """Send the output to the next stage; in the last one, gather the logits, of which each rank has a share.

        The first rank of a further replica sends them to rank 0.
        """
        target = self._first + self._rank - self._shares
        if self._rank < self._shares:
            hidden, target = self.logits(hidden), 0
            if self._rank or not self._first:
                return
        wait(self._handed_on)
        self._handed_on = distributed.isend(hidden, target)

    def end(self) -> None:
        """Let the other ranks leave."""
        self.forget()
        self._send_request(None, range(1, self._world_size))
        self._wait_for_request()

    def _send_request(self, work: Pass | None, ranks: range) -> None:
        content = torch.frombuffer(bytearray(json.dumps(work).encode()), dtype=torch.uint8)
        parts = torch.tensor([len(content)]), content
        self._sent.append([distributed.isend(part, rank, self._requests) for rank, part in product(ranks, parts)])

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


def run_rank(
    arguments: Namespace, dtype: torch.dtype | None, process: ProcessInfo, answer: Callable[[StagedPasses], None]
) -> None:
    """Be one of the processes that hold a model together.

    Args:
        arguments: the parsed command line.
        answer: what rank 0 does with the model.
    """
    shares = shares_of(arguments.tensor_parallel, process)
    own = in_replica(process, shares, arguments.parts)
    if own.world_size < process.world_size and not arguments.prompts_file:
        raise ConfigError(
            f"--parts: {process.world_size // own.world_size} replicas answer a file of prompts together; expected "
            f"--prompts-file, or {counted(own.world_size, 'process')}"
        )
    joining.join(process, PATIENCE)
    arguments.model = gather(arguments.model)[0]  # where none is given, hosts may find different ones
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    failure = None
    with RankMonitor(process, stage_of(own, shares), timeout_minutes=0):
        handle_signals(process)
        model = load_stage(arguments.model, dtype, own, shares, arguments.adapter, arguments.parts)
        passes = StagedPasses(model, process, shares, own)
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
            print_to_stderr("error: interrupted")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave_at_once)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(REPORTED))


def shares_of(asked: int | None, process: ProcessInfo) -> int:
    """Return how many ranks share a stage: as many as asked for, all with 0, one without `--tensor-parallel`.

    Raises:
        ConfigError: they do not divide the processes.
    """
    shares = 1 if asked is None else asked or process.world_size
    if process.world_size % shares:
        raise ConfigError(
            f"--tensor-parallel: expected a divisor of {process.world_size}, the processes; found {shares}"
        )
    return shares


def in_replica(process: ProcessInfo, shares: int, parts: list[int] | None) -> ProcessInfo:
    """Return a process's place in its replica, as if there were no other.

    Args:
        parts: layers per stage, or the number of stages alone.

    Raises:
        ConfigError: the replicas do not divide the processes.
    """
    if not parts:
        return process
    stages = len(parts) if len(parts) > 1 else parts[0]
    size = stages * shares
    if process.world_size % size:
        held = f"{stages} stages of {shares}"
        raise ConfigError(f"--parts: expected a multiple of {size} processes ({held}), found {process.world_size}")
    return replace(process, rank=process.rank % size, world_size=size)


def stage_of(process: ProcessInfo, shares: int = 1) -> int:
    """Return the stage that a process holds."""
    return (process.world_size - 1 - process.rank) // shares


def load_stage(
    folder: str | Path,
    dtype: torch.dtype | None,
    process: ProcessInfo,
    shares: int = 1,
    adapter: str | None = None,
    parts: list[int] | None = None,
) -> CausalLM:
    """Load the layers of this process's stage, or its share of them; all ranks call it together.

    Args:
        process, parts: as of `in_replica`, whose result this process is.

    Raises:
        RunRefused: on every rank, if some rank cannot.
    """
    group = distributed.new_subgroups(shares)[0]
    with agreed():
        spec = read_spec(find_model(folder, adapter=True))
        chosen = parts if parts and len(parts) > 1 else divide_by_weights(spec, process.world_size // shares)
        if sum(chosen) != spec.n_layers:
            raise ConfigError(
                f"--parts: {chosen} sums to {sum(chosen)}, but the model has {spec.n_layers} layers ({spec.n_blocks} "
                "blocks + embedding + head)"
            )
        if not distributed.get_rank():
            replicas = distributed.get_world_size() // process.world_size
            print_to_stderr(f"stages: {len(chosen)}, of {chosen} layers; replicas: {replicas}")
        layers = range(*layer_ranges(chosen)[stage_of(process, shares)])
        if shares > 1:
            return load_share(folder, group, dtype, DEVICE, layers, adapter)
        return load_model(folder, dtype, DEVICE, layers, adapter)


def divide_by_weights(spec: ModelSpec, stages: int) -> list[int]:
    """Divide the layers so that the largest stage has the fewest weights: a pass takes as long as reading them does."""
    weights = [sum(map(math.prod, spec.shapes(layer).values())) for layer in range(spec.n_layers)]
    parts = best_split(stages * [weights], lambda *_: True)
    if parts is None:
        raise ConfigError(
            f"{stages} stages for a model of {spec.n_layers} layers (embedding, {spec.n_blocks} blocks and head); "
            f"expected at most {spec.n_layers}"
        )
    return parts
