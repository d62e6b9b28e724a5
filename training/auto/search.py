"""Search the fastest run on a machine, giving up as little as needed to fit.

First nothing is given up. Where nothing fits, optimizer states are offloaded, then activations too; at last samples are
cut at half the length, as long as that cuts no more than `CUT` of them. On a device whose speed is not known, as a CPU,
one layer of each kind is timed, on the threads of a process.

A CPU may run any number of processes that divides its cores, up to `MOST`; what is free of its memory counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from rich.console import Console

from data.tokenized.columns import SPLIT_KIND
from data.tokenized.dataset import Dataset
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.launch.start import Hosts
from training.metrics.devices import GIGA, Device, parse_devices, this_device
from training.plan.inputs import Basis, Calibration
from training.plan.plan import Plan
from training.plan.search import OFFLOAD, SHORTEST, Feed, advise_stages, feed_of, search, speed
from training.plan.timing import calibrate

MOST = 8  # processes without GPUs
FREE = 0.9  # share of the free memory that is planned with
CUT = 0.1  # share of the samples that may be cut to make a run fit
ALIKE = 0.9  # speed relative to another plan that estimates cannot tell apart
ROUNDS = 3  # in which layers are timed, on each number of threads in turn
TIMED = 512  # tokens at most of which a layer is timed


@dataclass(frozen=True)
class Machine:
    """Where a run is to start.

    Attributes:
        kind: device of each process; on a CPU they share it.
        counts: possible numbers of processes.
        memory: bytes of main memory to plan with, over all hosts.
        name: for the log.
    """

    kind: Device
    counts: tuple[int, ...]
    memory: float
    name: str

    @classmethod
    def find(cls, hosts: Hosts | None, devices: str | None) -> Machine:
        """Find this machine, the hosts of a hostfile (taken to be like it), or devices as `--plan` knows them."""
        if devices:
            count, kind = parse_devices(devices)
            return cls(kind, (count,), math.inf, f"{count} x {kind.name}, as --devices says")
        kind, gpus, cores = this_device(), torch.cuda.device_count(), len(os.sched_getaffinity(0))
        memory = FREE * psutil.virtual_memory().available * len(hosts or [0])
        what = f"{gpus} x {kind.name}" if gpus else f"{cores} cores, {memory / GIGA:.0f} GB of memory for a run"
        if hosts:
            slots = sum(map(len, hosts.values()))
            return cls(kind, (slots,), memory, f"{slots} slots on {', '.join(hosts)}, taken to be like here: {what}")
        counts = (gpus,) if gpus else tuple(n for n in range(1, min(cores, MOST) + 1) if cores % n == 0)
        return cls(kind, counts, memory, what)

    def device(self, processes: int) -> Device:
        """Return the device, or share of a CPU, of each of N processes."""
        return self.kind if self.kind.memory else replace(self.kind, memory=int(self.memory / processes))


@dataclass
class Search:
    """Search the fastest run of a model on a machine.

    Attributes:
        read: the records, cut to a config's length.
        fixed: keys that stay as the config has them.
        ranking: the best plans, the fastest first.
    """

    machine: Machine
    spec: ModelSpec
    read: Callable[[TrainConfig], Dataset]
    fixed: frozenset[str]
    log: Console

    def __post_init__(self) -> None:
        self.ranking: list[Plan] = []
        self._calibrations: dict[int, Calibration] = {}

    def best(self, config: TrainConfig) -> Plan:
        """Return the fastest plan of those that give up least.

        Raises:
            ConfigError: none fits.
        """
        counts = self.machine.counts
        for changed in self._ladder(config):
            feed = feed_of(self.read(changed), self.spec)
            bases = [self._basis(changed, count, feed) for count in counts]
            if not bases[0].device.known and not self._calibrations:
                self._calibrate(bases)
                bases = [
                    replace(each, calibration=self._calibrations[n]) for n, each in zip(counts, bases, strict=True)
                ]
            found = (self._search(basis, count, feed) for basis, count in zip(bases, counts, strict=True))
            self.ranking = sorted((plan for plans in found for plan in plans if self._has_memory(plan)), key=speed)
            if self.ranking:
                return self._fewest_recomputed(self._fewest_processes())
        raise ConfigError(self._refusal(bases[-1]))

    def _ladder(self, config: TrainConfig) -> Iterator[TrainConfig]:
        """The config, and its changes where it does not fit."""
        data = self.read(config)
        whole = data.lengths[~data.of_type(SPLIT_KIND)]  # texts lose nothing
        while True:
            yield config
            if self.machine.kind.reserves and "zero_optimization" not in self.fixed:
                zero = config.zero_optimization.model_copy(update={"offload_optimizer": OFFLOAD})
                yield (offloaded := config.model_copy(update={"zero_optimization": zero}))
                if "offload_activations" not in self.fixed:
                    yield offloaded.model_copy(update={"offload_activations": True})
            half = config.max_seq_len // 2
            if "max_seq_len" in self.fixed or half < SHORTEST or (whole > half).sum() > CUT * len(whole):
                return
            config = config.model_copy(update={"max_seq_len": half})

    def _calibrate(self, bases: Sequence[Basis]) -> None:
        """Time the layers for each number of processes; in turn, since other programs come and go."""
        self.log.print(f"timing a layer of each kind, as one of {', '.join(map(str, self.machine.counts))} processes")
        for _ in range(ROUNDS):
            for basis, count in zip(bases, self.machine.counts, strict=True):
                work = basis.workload
                length = min(math.ceil(work.length), TIMED)
                short = replace(work, rows=1, length=length, attended=min(work.attended, length))
                found = calibrate(basis.config, self.spec, short)
                self._calibrations[count] = found.least(self._calibrations.get(count, found))

    def _basis(self, config: TrainConfig, count: int, feed: Feed) -> Basis:
        """Inputs of a run in N processes."""
        stages = min(count, self.spec.n_layers)
        topo = config.model_topo if "model_topo" in self.fixed else config.model_topo.spread(stages, 1)
        config = config.model_copy(update={"model_topo": topo})
        return Basis(config, self.spec, feed(config), self.machine.device(count), self._calibrations.get(count))

    def _search(self, basis: Basis, count: int, feed: Feed) -> list[Plan]:
        """Search all combinations, where the leanest fits with some dims: a tenth of the work where it does not."""
        least = {"train_micro_batch_size_per_gpu": 1, "use_grad_ckpt": True, "schedule": "1f1b"}
        leanest = basis.changed(**{key: value for key, value in least.items() if key not in self.fixed})
        if not search(leanest, count, feed, self.fixed | frozenset(least)):
            return []
        return search(basis, count, feed, self.fixed)

    def _has_memory(self, plan: Plan) -> bool:
        """Whether main memory suffices for what is offloaded."""
        held = sum(stage.memory.host for stage in plan.stages) * plan.basis.config.model_topo.replicas
        return held <= self.machine.memory

    def _fewest_processes(self) -> Plan:
        """The fastest plan; on a CPU the one with the fewest processes of those about as fast.

        It holds less, and other programs delay one process less than several that wait for each other.
        """
        fastest = self.ranking[0]
        if self.machine.kind.reserves:
            return fastest
        alike = [plan for plan in self.ranking if plan.seconds * ALIKE <= fastest.seconds]
        return min(alike, key=lambda plan: plan.basis.config.model_topo.processes)

    def _fewest_recomputed(self, plan: Plan) -> Plan:
        """Where all blocks recompute on a device with known memory: let as few as needed recompute."""
        config = plan.basis.config
        if config.use_grad_ckpt is not True or "use_grad_ckpt" in self.fixed or not self.machine.kind.memory:
            return plan
        config = config.with_parts(plan.parts).model_copy(update={"use_grad_ckpt": "auto"})
        return Plan.make(replace(plan.basis, config=config))

    def _refusal(self, basis: Basis) -> str:
        plan = Plan.make(basis.changed(use_grad_ckpt=True, train_micro_batch_size_per_gpu=1))
        memory = basis.device.memory or math.inf
        need = f"in {len(plan.stages)} stages a process needs {plan.peak / GIGA:.1f} GB, and has {memory / GIGA:.1f} GB"
        if plan.fits:
            need = f"what goes to main memory is more than {self.machine.memory / GIGA:.1f} GB"
        more = advise_stages(plan.basis) if self.machine.kind.reserves else []
        expected = f"{more[0].alone.basis.config.model_topo.stages} such processes, or " if more else ""
        return (
            f"--model: fits nowhere on {self.machine.name}: with all blocks recomputed and max_seq_len "
            f"{basis.config.max_seq_len} {need}; expected {expected}a smaller model"
        )
