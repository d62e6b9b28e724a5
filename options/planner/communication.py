"""Messages of a run's processes: their bytes, the link each takes (`--links nvlink4,ib400 --per-host 8`), their time.

Launchers number processes host by host, and neighbours along the last of the `axes` are neighbouring processes; so axes
and dims say which processes share a host. A ring crosses from host to host once per host, by as many links at a time
as the group has processes on a host. In an exchange each process uses both links at a time.

With `model_topo.sequence: n` a process has 1/n of each row's tokens. Around attention heads are exchanged for tokens:
queries, keys, values and outputs, each the bytes of the local tensor but the own part; keys and values are repeated
until the processes divide their heads. With T processes to a layer attention and MLP each end in a sum over all tokens'
hidden states, and begin with one in the backward pass. The embedding is summed too, and so is the gradient of the
head's input; the loss needs three numbers a token from each.

Latencies are those by which NCCL chooses its algorithms (src/graph/tuning.cc, ring and simple protocol); Ethernet's is
an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from common.quantities import GIGA
from models.parallel.groups import RankGroup
from models.parallel.tensor import plan_of
from models.spec import ModelSpec, key_heads
from options.planner.links import Link
from training.config.model_topo import ModelTopo
from training.config.precision import training_dtype
from training.errors import ConfigError
from training.metrics.devices import HOST_LINK, LINKED, Device

if TYPE_CHECKING:
    from options.planner.inputs import Basis

PER_HOST = 8  # GPUs of a host, where `--per-host` is not given
NVLINK = "nvlink"  # that of the device
BY_NVLINK, BY_PCIE, BY_NETWORK, BY_TCP = 3.4e-6, 5.7e-6, 9.6e-6, 3e-5  # latency in seconds
# GB/s in one direction for each GPU, of which a run gets `LINKED`.
_KNOWN = {
    "nvlink2": (150, BY_NVLINK),
    "nvlink3": (300, BY_NVLINK),
    "nvlink4": (450, BY_NVLINK),
    "nvlink5": (900, BY_NVLINK),
    "pcie3": (12.5, BY_PCIE),
    "pcie4": (25, BY_PCIE),
    "pcie5": (50, BY_PCIE),
    "ib100": (12.5, BY_NETWORK),
    "ib200": (25, BY_NETWORK),
    "ib400": (50, BY_NETWORK),
    "eth10": (1.25, BY_TCP),
    "eth25": (3.125, BY_TCP),
    "eth100": (12.5, BY_TCP),
}
KNOWN = {name: Link(latency=latency, bandwidth=LINKED * GIGA * speed) for name, (speed, latency) in _KNOWN.items()}
GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"  # of a plan: in the forward, the backward pass
FP32 = 4
OF_LOSS = 3  # numbers of a token: the largest logit, the sum of exponentials, the target's logit


@dataclass(frozen=True)
class Group:
    """A process group: its size, how many hosts it is on, and its links inside of a host and between hosts."""

    size: int
    hosts: int
    inside: Link
    between: Link

    @property
    def bandwidth(self) -> float:
        """Bytes/s that each process sends in a ring."""
        if self.hosts == 1:
            return self.inside.bandwidth
        return min(self.inside.bandwidth, self.between.bandwidth * self.size / self.hosts)

    def gather(self, size: float) -> float:
        """Return seconds of a ring all-gather, or reduce-scatter, of a tensor of `size` bytes."""
        steps = (self.size - self.hosts) * self.inside.latency + (self.hosts - 1) * self.between.latency
        return steps + (1 - 1 / self.size) * size / self.bandwidth

    def all_reduce(self, size: float) -> float:
        """Return seconds of a ring all-reduce of `size` bytes."""
        return 2 * self.gather(size)

    def all_to_all(self, size: float) -> float:
        """Return seconds in which each process sends each an equal part of its `size` bytes."""
        here = self.size / self.hosts
        parts = [(self.inside, (here - 1) / self.size), (self.between, (self.size - here) / self.size)]
        return max(link.seconds(share * size) for link, share in parts if share)


@dataclass(frozen=True)
class Fabric:
    """The links of a run's processes.

    Attributes:
        name: as in `--links`; empty for the device's own links.
        per_host: GPUs of a host.
    """

    name: str
    inside: Link
    between: Link
    per_host: int = PER_HOST

    @classmethod
    def named(cls, text: str, device: Device, per_host: int = PER_HOST) -> Fabric:
        """Parse `--links`.

        Raises:
            ConfigError: not two known links.
        """
        own = Link(latency=BY_NVLINK, bandwidth=device.link)
        known = KNOWN | ({NVLINK: own} if device.link > HOST_LINK else {})
        names = [name.strip().lower() for name in text.split(",")]
        if len(names) != 2 or not known.keys() >= set(names):
            raise ConfigError(
                f"--links: {text!r}: expected the link inside of a host and the one between hosts, such as "
                f"nvlink4,ib400, of {', '.join(known)}"
            )
        if per_host < 1:
            raise ConfigError(f"--per-host: expected at least 1, found {per_host}")
        return cls(",".join(names), known[names[0]], known[names[1]], per_host)

    @classmethod
    def of(cls, device: Device) -> Fabric:
        """Assume that all processes are neighbours."""
        link = Link(latency=0.0, bandwidth=device.link)
        return cls("", link, link)

    def group(self, ranks: NDArray[Any]) -> Group:
        """Return the slowest of these process groups, [groups, size]."""
        hosts = max(len(set(row)) for row in (ranks // self.per_host).tolist())
        return Group(ranks.shape[1], hosts, self.inside, self.between)

    def to_next(self, topo: ModelTopo) -> list[Link]:
        """Return the slowest link from each stage to the next."""
        ends = pairwise((topo.along("pipe") // self.per_host).T)
        return [self.between if (first != second).any() else self.inside for first, second in ends]

    def placed(self, topo: ModelTopo) -> ModelTopo:
        """Order the axes as a run does where its config names none (`training.distributed.placement`)."""
        if "axes" in topo.process_topology.model_fields_set or topo.processes <= self.per_host:
            return topo

        def crossings(topo: ModelTopo) -> tuple[int, ...]:
            groups = (self.group(ranks).hosts for ranks in (topo.sharing("rows"), topo.along("data")))
            return *groups, self.to_next(topo).count(self.between)

        return min(topo, topo.turned(), key=crossings)


@dataclass(frozen=True)
class Messages:
    """Bytes of the local tensors of each message.

    Attributes:
        exchanged: all-to-all in the group of sequence parallelism.
        summed: all-reduce in the group of tensor parallelism.
        gathered: all-gather there, where a family's plan joins what lies between two products.
    """

    exchanged: list[float] = field(default_factory=list)
    summed: list[float] = field(default_factory=list)
    gathered: list[float] = field(default_factory=list)

    def __add__(self, other: Messages) -> Messages:
        return Messages(self.exchanged + other.exchanged, self.summed + other.summed, self.gathered + other.gathered)

    def sent(self, topo: ModelTopo) -> tuple[float, float]:
        """Return bytes that a process sends: in exchanges, and in sums and gathers."""
        rounds = 2 * sum(self.summed) + sum(self.gathered)
        return (1 - 1 / topo.sequence) * sum(self.exchanged), (1 - 1 / topo.tensor) * rounds

    def seconds(self, basis: Basis) -> dict[str, float]:
        """Return seconds of exchanges, and of sums and gathers; nothing is computed meanwhile."""
        topo, group = basis.config.model_topo, basis.fabric.group
        rows, layers = group(topo.sharing("rows")), group(topo.sharing("layers"))
        joined = sum(map(layers.all_reduce, self.summed)) + sum(map(layers.gather, self.gathered))
        return {"exchanges": sum(map(rows.all_to_all, self.exchanged)), "all_reduces": joined}


def layer_messages(basis: Basis, layer: int) -> tuple[Messages, Messages]:
    """Return a layer's messages in the forward and backward pass of a micro-batch, without recomputation."""
    config, spec, topo = basis.config, basis.spec, basis.config.model_topo
    itemsize, tokens = training_dtype(config).itemsize, basis.share.micro_tokens
    hidden = tokens * spec.config.hidden_size * itemsize
    is_block = 0 < layer < spec.n_layers - 1
    forward, backward = Messages(), Messages()
    if topo.sequence > 1 and is_block:
        all_heads, all_keys = int(spec.config.num_attention_heads), key_heads(spec.config)
        own = len(range(all_keys)[RankGroup(topo.tensor).part(all_keys)])
        heads, keys = own * all_heads // all_keys, math.lcm(own, topo.sequence)
        width = vars(spec.config).get("head_dim") or spec.config.hidden_size // all_heads
        exchanged = Messages(exchanged=[tokens * width * itemsize * count for count in (heads, keys, keys, heads)])
        forward, backward = forward + exchanged, backward + exchanged
    if topo.tensor > 1:
        supervised = tokens * basis.workload.supervised
        of_ends = {0: [hidden], spec.n_layers - 1: [hidden * basis.workload.supervised, *OF_LOSS * [FP32 * supervised]]}
        joined = _joined(spec, layer, tokens * itemsize)
        forward += Messages(summed=of_ends.get(layer, [hidden, hidden]), gathered=joined[GATHERED])
        backward += Messages(summed=[hidden, hidden] if is_block else [], gathered=joined[SPLIT])
    return forward, backward


def _joined(spec: ModelSpec, layer: int, size: float) -> dict[str, list[float]]:
    """Return bytes of the tensors between two products that a family's plan gathers whole on each process.

    Args:
        size: bytes of one number for each token.
    """
    plan = plan_of(spec)
    found: dict[str, list[float]] = {GATHERED: [], SPLIT: []}
    for name, shape in spec.shapes(layer).items():
        if (word := plan.get(name.removesuffix(".weight"))) in found:
            found[word].append(size * shape[0 if word == GATHERED else 1])
    return found


def stage_messages(basis: Basis, layers: Iterable[int]) -> Messages:
    """Return the messages of all passes of a micro-batch through these layers, with recomputation."""
    total = Messages()
    for layer in layers:
        forward, backward = layer_messages(basis, layer)
        total += forward + backward + (forward if layer in basis.recomputed else Messages())
    return total
