"""The fastest way to run that fits: the planner's search, over what makes a run fit, the least loss first.

First nothing is given up. Where nothing fits then, the optimizer's states go to main memory, then activations too; at
last samples are cut at half the length, as long as that cuts no more than `CUT` of them. On a device whose speed nobody
has measured, as a CPU, one layer of each kind is timed, on as many threads as a process will have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from data.tokenized.columns import SPLIT_KIND
from data.tokenized.dataset import Dataset
from models.spec import ModelSpec
from training.auto.machine import Machine
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.metrics.devices import Device
from training.plan.alternatives import OFFLOAD, SHORTEST, more_stages
from training.plan.basis import Basis, Calibration
from training.plan.calibration import calibrate
from training.plan.command import feed_of
from training.plan.plan import Plan
from training.plan.rendering import GB
from training.plan.search import search
from training.plan.workload import Workload

CUT = 0.1  # of the samples, that may be cut to make a run fit
ALIKE = 0.9  # as fast as another plan: no more than estimates tell apart
FASTER = 1.3  # as fast as fp32, that bf16 has to be on a CPU
PRODUCTS = 50  # that are timed for it
ROUNDS = 3  # in which layers are timed, on each number of threads in turn
TIMED = 512  # tokens at most of which a layer is timed

Read = Callable[[TrainConfig], Dataset]  # the records, cut to the config's length
Feed = Callable[[TrainConfig], Workload]  # what a step of these records has


def precision(device: Device) -> tuple[str | None, str]:
    """`bf16`, `fp16` or neither, and why."""
    if device.reserves:
        return ("bf16", f"{device.name} computes in it") if device.bf16 else ("fp16", f"{device.name} has no bf16")
    least = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    for _ in range(PRODUCTS):  # in turn, as other programs come and go
        for dtype in least:
            factors = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 512, dtype=dtype)
            begin = time.perf_counter()
            torch.mm(*factors)
            least[dtype] = min(least[dtype], time.perf_counter() - begin)
    ratio = least[torch.float32] / least[torch.bfloat16]
    told = f"on this CPU a product in bf16 is {ratio:.1f} times as fast as in fp32"
    return ("bf16" if ratio > FASTER else None), told


@dataclass
class Search:
    """Looks for the fastest run of a model on a machine.

    Attributes:
        fixed: keys that stay as the config has them.
        ranking: the best plans, the fastest first.
    """

    machine: Machine
    spec: ModelSpec
    read: Read
    fixed: frozenset[str]
    log: Console

    def __post_init__(self) -> None:
        self.ranking: list[Plan] = []
        self._calibrations: dict[int, Calibration] = {}

    def best(self, config: TrainConfig) -> Plan:
        """The fastest plan of those for which the least is given up.

        Raises:
            ConfigError: none fits.
        """
        for changed in self._ladder(config):
            feed = feed_of(self.read(changed), self.spec)
            bases = [self._basis(changed, count, feed) for count in self.machine.counts]
            if not bases[0].device.known and not self._calibrations:
                self._calibrate(bases)
                bases = [self._basis(changed, count, feed) for count in self.machine.counts]
            found = (self._search(basis, count, feed) for basis, count in zip(bases, self.machine.counts, strict=True))
            fitting = [plan for plans in found for plan in plans if self._in_main_memory(plan)]
            self.ranking = sorted(fitting, key=lambda plan: (round(plan.seconds, 9), plan.peak))
            if fitting:
                return self._fewest_recomputed(self._fewest_processes())
        raise ConfigError(self._refusal(bases[-1]))

    def _ladder(self, config: TrainConfig) -> Iterator[TrainConfig]:
        """The config, and what it may be changed to where it does not fit."""
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
        told = ", ".join(str(count) for count in self.machine.counts)
        self.log.print(f"timing a layer of each kind, as one of {told} processes")
        for _ in range(ROUNDS):
            for basis, count in zip(bases, self.machine.counts, strict=True):
                work = basis.workload
                length = min(math.ceil(work.length), TIMED)
                short = replace(work, rows=1, length=length, attended=min(work.attended, length))
                found = calibrate(basis.config, self.spec, short)
                self._calibrations[count] = found.least(self._calibrations.get(count, found))

    def _basis(self, config: TrainConfig, count: int, feed: Feed) -> Basis:
        """Of a run in so many processes, which the search spreads in its own way."""
        stages = min(count, self.spec.n_layers)
        topo = config.model_topo if "model_topo" in self.fixed else config.model_topo.spread(stages, 1)
        config = config.model_copy(update={"model_topo": topo})
        return Basis(config, self.spec, feed(config), self.machine.device(count), self._calibrations.get(count))

    def _search(self, basis: Basis, count: int, feed: Feed) -> list[Plan]:
        """All combinations, where the leanest of them fits with some dims: a tenth of the work where it does not."""
        least = {"train_micro_batch_size_per_gpu": 1, "use_grad_ckpt": True, "schedule": "1f1b"}
        leanest = basis.changed(**{key: value for key, value in least.items() if key not in self.fixed})
        if not search(leanest, count, feed, self.fixed | frozenset(least)):
            return []
        return search(basis, count, feed, self.fixed)

    def _in_main_memory(self, plan: Plan) -> bool:
        held = sum(stage.memory.host for stage in plan.stages) * plan.basis.config.model_topo.replicas
        return held <= self.machine.memory

    def _fewest_processes(self) -> Plan:
        """The fastest plan; of those about as fast on the cores of a CPU the one that divides them least.

        It holds less, and what else the machine does delays one process less than several that wait for each other.
        """
        fastest = self.ranking[0]
        if self.machine.kind.reserves:
            return fastest
        alike = [plan for plan in self.ranking if plan.seconds * ALIKE <= fastest.seconds]
        return min(alike, key=lambda plan: plan.basis.config.model_topo.processes)

    def _fewest_recomputed(self, plan: Plan) -> Plan:
        """Where all blocks recompute on a device whose memory is known, as many as have to."""
        config = plan.basis.config
        if config.use_grad_ckpt is not True or "use_grad_ckpt" in self.fixed or not self.machine.kind.memory:
            return plan
        config = config.with_parts(plan.parts).model_copy(update={"use_grad_ckpt": "auto"})
        return Plan.make(replace(plan.basis, config=config))

    def _refusal(self, basis: Basis) -> str:
        plan = Plan.make(basis.changed(use_grad_ckpt=True, train_micro_batch_size_per_gpu=1))
        memory = basis.device.memory or math.inf
        need = f"in {len(plan.stages)} stages a process needs {plan.peak / GB:.1f} GB, and has {memory / GB:.1f} GB"
        if plan.fits:
            need = f"what goes to main memory is more than {self.machine.memory / GB:.1f} GB"
        more = more_stages(plan.basis) if self.machine.kind.reserves else []
        expected = f"{more[0].alone.basis.config.model_topo.stages} such processes, or " if more else ""
        return (
            f"--model: fits nowhere on {self.machine.name}: with all blocks recomputed and max_seq_len "
            f"{basis.config.max_seq_len} {need}; expected {expected}a smaller model"
        )
