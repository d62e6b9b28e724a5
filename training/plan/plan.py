"""The plan of a run: its stages with their time and memory, and what comes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from training.metrics.flops import ModelFlops
from training.plan.costs import LayerTime
from training.plan.memory import StageMemory
from training.plan.partition import LayerRange
from training.plan.parts import Basis, best_parts
from training.schedule.simulation import Simulation, simulate

DAY = 86_400.0


@dataclass(frozen=True)
class StagePlan:
    """One rank of the pipeline.

    Attributes:
        ranges: the layers that it holds, [begin, end); two with dualpipev.
        parameters: their weights.
        seconds: of work in a step, the optimizer's included.
    """

    ranges: tuple[LayerRange, ...]
    parameters: int
    memory: StageMemory
    seconds: float

    @property
    def layers(self) -> list[int]:
        return [layer for begin, end in self.ranges for layer in range(begin, end)]


@dataclass(frozen=True)
class Plan:
    """What a run with these parts will take."""

    basis: Basis
    parts: list[int]

    @classmethod
    def make(cls, basis: Basis) -> Plan:
        """With the parts that the config names or, with `auto`, the best ones; recomputation likewise.

        Raises:
            ConfigError: the config and the model do not fit each other.
        """
        basis = replace(basis, recompute=None)
        plan = cls(basis, basis.config.parts_for(basis.spec.n_layers) or best_parts(basis))
        if basis.config.use_grad_ckpt != "auto":
            return plan
        chosen = [basis.memory.fewest_recomputed(rank, held) for rank, held in enumerate(plan.held)]
        return cls(replace(basis, recompute=frozenset().union(*chosen)), plan.parts)

    @cached_property
    def held(self) -> list[tuple[LayerRange, ...]]:
        """The ranges of layers of each rank."""
        ends = list(accumulate(self.parts))
        chunks = list(zip([0, *ends], ends, strict=False))
        ranks = range(self.basis.config.model_topo.stages)
        return [(chunks[rank], chunks[-1 - rank]) if self.basis.config.folded else (chunks[rank],) for rank in ranks]

    @cached_property
    def stages(self) -> list[StagePlan]:
        """By rank."""
        memory = self.basis.memory
        weights = [sum(s.numel() for s in self.basis.spec.shapes(n).values()) for n in range(self.basis.spec.n_layers)]
        found = []
        for rank, held in enumerate(self.held):
            layers = [layer for begin, end in held for layer in range(begin, end)]
            seconds = sum(self._times[layer].of_step(self.micro_batches) for layer in layers)
            found.append(StagePlan(held, sum(weights[n] for n in layers), memory.rank(rank, held), seconds))
        return found

    @property
    def micro_batches(self) -> int:
        """Of one replica in a step."""
        return max(self.basis.workload.micro_batches, self.basis.config.least_micro_batches)

    @cached_property
    def _times(self) -> list[LayerTime]:
        times = self.basis.times
        return [times.layer(layer) for layer in range(self.basis.spec.n_layers)]

    @cached_property
    def _per_chunk(self) -> tuple[list[float], list[float]]:
        """Seconds of each chunk's forward and backward pass of one micro-batch."""
        ends = list(accumulate(self.parts))
        held = [self._times[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        return [sum(t.forward for t in times) for times in held], [sum(t.backward for t in times) for times in held]

    @cached_property
    def _simulation(self) -> Simulation:
        """A step of as many micro-batches as fill the pipeline well; more only repeat its middle."""
        config, work = self.basis.config, self.basis.workload
        size = 2 if config.bf16.enabled or config.fp16.enabled else 4
        message = work.micro_tokens * self.basis.spec.config.hidden_size * size
        count = min(self.micro_batches, 8 * config.chunks)
        schedule = config.schedule if config.folded else "1f1b"
        return simulate(schedule, *self._per_chunk, count, message / self.basis.device.link)

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        simulation = self._simulation
        config = self.basis.config
        chunks = [sum(pair) for pair in zip(*self._per_chunk, strict=True)]
        if config.folded:
            chunks = [chunks[rank] + chunks[-1 - rank] for rank in range(config.model_topo.stages)]
        rest = self.micro_batches - min(self.micro_batches, 8 * config.chunks)
        update = max(sum(self._times[n].update for b, e in s.ranges for n in range(b, e)) for s in self.stages)
        return simulation.seconds + rest * max(chunks) + update

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which nothing is computed."""
        return 1 - sum(stage.seconds for stage in self.stages) / (len(self.stages) * self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Over all replicas, without padding."""
        return self.basis.workload.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation (`metrics.flops`); None where the device's peak is not known, and in fp32."""
        config, work = self.basis.config, self.basis.workload
        if not self.basis.device.known or not (config.bf16.enabled or config.fp16.enabled):
            return None
        flops = ModelFlops.of(self.basis.spec)
        pairs = flops.pair * work.attended + flops.windowed_pair * min(work.attended, flops.window)
        padded = work.micro_tokens * work.micro_batches * config.model_topo.replicas
        total = work.tokens * (flops.token + pairs) + padded * work.supervised * flops.supervised
        return total / self.seconds / (self.basis.device.half * config.model_topo.processes)

    @property
    def days(self) -> float | None:
        """Of the whole run; None where the data are not known."""
        steps = self.basis.workload.steps
        return None if steps is None else steps * self.seconds / DAY

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(stage.memory.peak for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory; always, where nothing is known about it."""
        return self.basis.device.memory is None or self.peak <= self.basis.device.memory
