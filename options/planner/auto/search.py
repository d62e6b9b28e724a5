"""Search the fastest run on a machine, giving up as little as needed to fit.

First nothing is given up. Where nothing fits, optimizer states are offloaded, then activations, then gradients; at last
samples are cut at half the length, as long as that cuts no more than `CUT` of them. On a device whose speed is not
known, as a CPU, one layer of each kind is timed, on the threads of a process.

A CPU may run any number of processes that divides its cores, up to `MOST`; what is free of its memory counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import psutil
import torch
from rich.console import Console

from common.quantities import counted, gigabytes
from data.records.record import SPLIT_KIND
from data.tokenized.dataset import Dataset
from models.spec import ModelSpec
from options.planner.inputs import Basis
from options.planner.measurements import Calibration
from options.planner.plan import Plan
from options.planner.progress import each_of, searching
from options.planner.search import SHORTEST, Feed, feed_of, give_up, more_stages, search, speed
from options.planner.timing import calibrate
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.metrics.devices import Device, devices_here, mixed, parse_devices

MOST = 8  # processes without GPUs
FREE = 0.9  # share of the free memory that is planned with
CUT = 0.1  # share of the samples that may be cut to make a run fit
ALIKE = 0.9  # speed relative to another plan that estimates cannot tell apart
ROUNDS = 3  # in which layers are timed, on each number of threads in turn
TIMED = 512  # tokens at most of which a layer is timed


@dataclass(frozen=True)
class Machine:
    """Where a run is to start."""

    kind: Device  # of each process; on a CPU they share it
    counts: tuple[int, ...]  # possible numbers of processes
    memory: float  # bytes of main memory to plan with, over all hosts
    name: str  # for the log

    @classmethod
    def find(cls, hosts: dict[str, list[int]] | None, devices: str | None) -> Machine:
        """Find this machine, the hosts of a hostfile (taken to be like it), or devices as `--plan` knows them."""
        if devices:
            count, kind = parse_devices(devices)
            return cls(kind, (count,), math.inf, f"{kind.counted(count)}, as --devices says")
        kind, gpus, cores = devices_here(), torch.cuda.device_count(), len(os.sched_getaffinity(0))
        memory = FREE * psutil.virtual_memory().available * len(hosts or [0])
        what = kind.counted(gpus) if gpus else f"{cores} cores, {gigabytes(memory)} of memory for a run"
        if hosts:
            slots = sum(map(len, hosts.values()))
            if kind.each:
                kind = mixed([kind.each[number % gpus] for number in chain.from_iterable(hosts.values())])
            return cls(kind, (slots,), memory, f"{slots} slots on {', '.join(hosts)}, taken to be like here: {what}")
        counts = (gpus,) if gpus else tuple(n for n in range(1, min(cores, MOST) + 1) if cores % n == 0)
        return cls(kind, counts, memory, what)

    def device(self, processes: int) -> Device:
        """Return the device, or share of a CPU, of each of N processes."""
        return self.kind if self.kind.memory else replace(self.kind, memory=int(self.memory / processes))

    def holds(self, plan: Plan) -> bool:
        """Say whether main memory suffices for what is offloaded."""
        held = sum(stage.memory.host for stage in plan.stages) * plan.basis.config.model_topo.replicas
        return held <= self.memory


@dataclass(frozen=True)
class Search:
    """Search the fastest run of a model on a machine.

    Attributes:
        read: the records, cut to a config's length.
        fixed: keys that stay as the config has them.
    """

    machine: Machine
    spec: ModelSpec
    read: Callable[[TrainConfig], Dataset]
    fixed: frozenset[str]
    log: Console

    def rank(self, config: TrainConfig) -> list[Plan]:
        """Return the fastest plans of those that give up least, the fastest first.

        Raises:
            ConfigError: none fits.
        """
        calibrations: dict[int, Calibration] = {}
        with searching(self.log):
            for changed in self.ladder(config):
                feed = feed_of(self.read(changed), self.spec)
                bases = {count: self._basis(changed, count, feed) for count in self.machine.counts}
                if not self.machine.kind.known:
                    calibrations = calibrations or self._calibrate(bases)
                    bases = {count: replace(basis, calibration=calibrations[count]) for count, basis in bases.items()}
                found = chain.from_iterable(self._search(basis, count, feed) for count, basis in bases.items())
                if ranking := sorted(filter(self.machine.holds, found), key=speed):
                    return ranking
        raise ConfigError(self._refusal(bases[self.machine.counts[-1]]))

    def ladder(self, config: TrainConfig) -> Iterator[TrainConfig]:
        """Yield the config, and its changes where it does not fit."""
        data = self.read(config)
        whole = data.lengths[~data.of_type(SPLIT_KIND)]  # texts lose nothing
        while True:
            yield from give_up(config, self.fixed) if self.machine.kind.reserves else [config]
            half = config.max_seq_len // 2
            if "max_seq_len" in self.fixed or half < SHORTEST or (whole > half).sum() > CUT * len(whole):
                return
            config = config.model_copy(update={"max_seq_len": half})

    def _basis(self, config: TrainConfig, count: int, feed: Feed) -> Basis:
        """Return the planner's inputs of a run in N processes."""
        if "model_topo" not in self.fixed:
            topo = config.model_topo.spread(min(count, self.spec.n_layers), 1)
            config = config.model_copy(update={"model_topo": topo})
        return Basis(config, self.spec, feed(config), self.machine.device(count))

    def _calibrate(self, bases: dict[int, Basis]) -> dict[int, Calibration]:
        """Time the layers for each number of processes; in turn, since other programs come and go."""
        self.log.print(f"timing a layer of each kind, as one of {', '.join(map(str, bases))} processes")
        found: dict[int, Calibration] = {}
        for count, basis in each_of([*bases.items()] * ROUNDS, "timings"):
            length = min(math.ceil(basis.workload.length), TIMED)
            short = replace(basis.workload, rows=1, length=length, attended=min(basis.workload.attended, length))
            measured = calibrate(basis.config, self.spec, short)
            found[count] = measured.least(found.get(count, measured))
        return found

    def _search(self, basis: Basis, count: int, feed: Feed) -> list[Plan]:
        """Search all combinations, where the leanest fits with some dims: a tenth of the work where it does not."""
        least = {"train_micro_batch_size_per_gpu": 1, "use_grad_ckpt": True, "schedule": "1f1b"}
        leanest = basis.changed(**{key: value for key, value in least.items() if key not in self.fixed})
        if not search(leanest, count, feed, self.fixed | frozenset(least)):
            return []
        return search(basis, count, feed, self.fixed)

    def choose(self, ranking: list[Plan]) -> Plan:
        """Choose the fastest plan; on a CPU the one with the fewest processes of those about as fast.

        It holds less, and other programs delay one process less than several that wait for each other. Where all blocks
        recompute on a device with known memory, as few as needed do.
        """
        plan, config = ranking[0], ranking[0].basis.config
        if not self.machine.kind.reserves:
            alike = [each for each in ranking if each.seconds * ALIKE <= plan.seconds]
            return min(alike, key=lambda each: each.basis.config.model_topo.processes)
        if config.use_grad_ckpt is not True or "use_grad_ckpt" in self.fixed:
            return plan
        config = config.with_parts(plan.parts).model_copy(update={"use_grad_ckpt": "auto"})
        return Plan.make(replace(plan.basis, config=config))

    def _refusal(self, basis: Basis) -> str:
        plan = Plan.make(basis.changed(use_grad_ckpt=True, train_micro_batch_size_per_gpu=1))
        memory = basis.device.memory or math.inf
        stages = counted(len(plan.stages), "stage")
        need = f"in {stages} a process needs {gigabytes(plan.peak)}, and has {gigabytes(memory)}"
        if plan.fits:
            need = f"what goes to main memory is more than {gigabytes(self.machine.memory)}"
        more = more_stages(plan.basis) if self.machine.kind.reserves else None
        expected = f"{len(more.stages)} such processes, or " if more else ""
        return (
            f"--model: fits nowhere on {self.machine.name}: with all blocks recomputed and max_seq_len "
            f"{basis.config.max_seq_len} {need}; expected {expected}a smaller model"
        )
