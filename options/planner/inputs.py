"""Inputs to the planner: the run, its micro-batches, the device, and corrections measured on it (`measurements`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, product
from math import ceil, prod
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import torch

from common.quantities import counted
from common.whole_files import kept, read_regular
from data.loader import Loader
from data.sample_set import SampleSet
from models.attention.positions import attention_kind
from models.family import EYES
from models.parallel.tensor import part_shapes
from models.spec import ModelSpec
from options.planner.communication import Fabric
from options.planner.links import Links
from options.planner.measurements import FILE, MEASURED_FILE, Calibration, Measured, digest, model_digest
from options.planner.row_chunks import chunk_of, cut
from options.row_chunks.keys import KEY
from training.config.keys import TrainConfig
from training.metrics.devices import Device
from training.schedule.instructions import Schedule

Found = TypeVar("Found")

SAMPLED_STEPS = 16  # of the first epoch, which stand for the others
# Keys that the times and the memory of stages depend on, besides device, model, data and torch.
DEPENDS = (
    "use_flash_attn use_grad_ckpt offload_activations offload_gradients schedule zero_optimization bf16 fp16 fp8 tf32 "
    "data_types row_chunk"
).split()


@dataclass(frozen=True)
class Images:
    """The images of micro-batches."""

    number: float = 0.0  # in a micro-batch, on average
    tokens: float = 0.0  # that an image takes, on average
    most: int = 0  # tokens that the images of a micro-batch take

    @classmethod
    def measured(cls, data: SampleSet, micro_batches: Sequence[Sequence[int]]) -> Images:
        """Count those of micro-batches, each a list of samples; none of the others may have more than a sample has."""
        if not data.image_tokens.any():
            return cls()
        tokens = [int(data.image_tokens[list(numbers)].sum()) for numbers in micro_batches]
        images = sum(len(data.samples[number].get("images", ())) for number in chain(*micro_batches))
        most = max(*tokens, int(data.image_tokens.max()))
        return cls(images / len(tokens), sum(tokens) / max(1, images), most)

    @property
    def conditions(self) -> dict[str, Any]:
        """What measured steps depend on, if there are images."""
        return {"images": [ceil(self.number), ceil(self.tokens)]} if self.number else {}

    def times(self, factor: float) -> Images:
        """Return those of larger or smaller micro-batches."""
        return replace(self, number=factor * self.number, most=ceil(factor * self.most))


@dataclass(frozen=True)
class Workload:
    """The micro-batches of a step."""

    rows: int  # packed sequences in a micro-batch
    length: float  # mean tokens of a row, padding included
    longest: int  # most tokens of a row
    attended: float  # mean length of a token's document, which the quadratic term grows with
    supervised: float  # share of trained-on tokens
    micro_batches: int  # of one replica in a step
    tokens: float  # in a step, without padding, over all replicas
    steps: int | None  # of the whole run; None where the data are not known
    source: str  # of these numbers, for the log
    images: Images = Images()

    @classmethod
    def of(cls, loader: Loader | None, config: TrainConfig) -> Workload:
        """Measure it where there is a loader, else assume it."""
        return cls.measured(loader, config) if loader else cls.assumed(config)

    @classmethod
    def assumed(cls, config: TrainConfig) -> Workload:
        """Assume that every document has `max_seq_len` tokens, all supervised."""
        length, (rows, micro_batches) = config.sample_limit, divide_rows(config.train_batch_size, config)
        unit = config.objective.unit
        return cls(
            rows=rows,
            length=length,
            longest=length,
            attended=config.max_seq_len,
            supervised=1.0,
            micro_batches=micro_batches,
            tokens=config.train_batch_size * length,
            steps=config.max_steps,
            source=f"assumed: every {unit} has max_seq_len, {config.max_seq_len}, tokens, all supervised",
        )

    @classmethod
    def measured(cls, loader: Loader, config: TrainConfig) -> Workload:
        """Measure the first global batches."""
        batches = [loader.batch(step) for step in range(min(SAMPLED_STEPS, loader.steps_per_epoch))]
        lengths = list(chain.from_iterable(batch.lengths for batch in batches))
        shapes: list[tuple[int, int]] = []
        for batch, replica in product(batches, range(loader.replicas)):
            shapes += loader.shapes(batch, replica)
        of_replicas = chain.from_iterable(batch.micro_batches for batch in batches)
        micro_batches = [list(chain(*rows)) for rows in chain(*of_replicas)]
        padded, rows = sum(map(prod, shapes)), max(rows for rows, _ in shapes)  # smaller where the schedule needs more
        return cls(
            rows=rows,
            length=padded / (rows * len(shapes)),
            longest=max(int(loader.data.lengths.max()), *(length for _, length in shapes)),  # which may come later
            attended=sum(length**2 for length in lengths) / sum(lengths),
            supervised=sum(batch.supervised for batch in batches) / padded,
            micro_batches=round(mean(batch.n_micro_batches for batch in batches)),
            tokens=mean(batch.tokens for batch in batches),
            steps=config.max_steps or config.n_epoches * loader.steps_per_epoch,
            source=f"measured on {counted(len(batches), 'batch')} of data_path",
            images=Images.measured(loader.data, micro_batches),
        )

    def shared(self, sequence: int) -> Workload:
        """Return one rank's share of each row under sequence parallelism."""
        return replace(self, length=self.length / sequence, longest=ceil(self.longest / sequence))

    @property
    def micro_tokens(self) -> float:
        """Tokens in a micro-batch, padding included."""
        return self.rows * self.length


def divide_rows(rows: int, config: TrainConfig) -> tuple[int, int]:
    """Return rows in a micro-batch, fewer where the schedule needs more of them, and their number."""
    size, least = config.micro_batch_size, config.least_micro_batches
    replicas = config.model_topo.row_replicas
    micro_batches = max(1, ceil(rows / (size * replicas)))
    if micro_batches < least <= rows // replicas:
        return ceil(rows / (least * replicas)), least
    return size, micro_batches


@dataclass(frozen=True)
class Basis:
    """Inputs of one plan."""

    config: TrainConfig
    spec: ModelSpec
    workload: Workload
    device: Device
    calibration: Calibration | None = None  # times are estimated without
    measured: Measured | None = None  # first steps of this run, which correct the plan
    links: Links | None = None  # measured by `--check`
    named: Fabric | None = None  # from `--links`, which overrides `links`
    in_stages: bool = True  # else plain ZeRO
    main_memory: int | None = None  # bytes of a host; None where they are not known
    recompute: frozenset[int] | None = None  # layers that recompute; without, by the config (with `auto`: all blocks)
    known: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False, compare=False)  # cache of `once`

    @classmethod
    def of_run(
        cls, config: TrainConfig, spec: ModelSpec, workload: Workload, device: Device, calibrated: bool = True
    ) -> tuple[Basis, list[str]]:
        """Add the measurements in the run's folder; return a line for the log where they cannot be used.

        Args:
            calibrated: whether a calibration, and measured links, count.
        """
        folder = Path(config.save_path)
        basis, lines = cls(config, spec, workload, device), list[str]()
        if calibrated:
            calibration = Calibration.read(folder, config, spec, lines.append)
            if calibration and device.each:
                lines.append(f"{FILE}: ignored: measured on {calibration.device}, and here are {device.name}")
                calibration = None
            basis = replace(basis, calibration=calibration, links=Links.read(folder, lines.append))
        measured = kept(folder / MEASURED_FILE, Measured.model_validate_json, read_regular, lines.append)
        if measured is None:
            return basis, lines
        then, now = measured.conditions, basis.conditions
        if other := [key for key in now if then.get(key) != now[key]]:
            key = other[0]
            values = "" if key in ("model", "calibration") else f": {then.get(key)} then, {now[key]} now"
            return basis, [*lines, f"{MEASURED_FILE}: ignored: measured with another {key}{values}"]
        return replace(basis, measured=measured), lines

    @cached_property
    def of_stages(self) -> list[Device]:
        """The device of each stage's processes, or their devices where they differ."""
        ranks: list[list[int]] = [[] for _ in range(self.config.model_topo.stages)]
        for rank in range(self.config.model_topo.processes):
            ranks[self.config.model_topo.stage_of(rank)].append(rank)
        return list(map(self.device.of, ranks))

    @property
    def conditions(self) -> dict[str, Any]:
        """What measured steps depend on, in JSON's types."""
        settings = self.config.dump()
        return {
            "device": self.device.name,
            "torch": torch.__version__,
            "model": model_digest(self.spec),
            "calibration": digest(vars(self.calibration) if self.calibration else None),
            "rows": self.workload.rows,
            "length": ceil(self.workload.length),
            **self.workload.images.conditions,
            "compile": self.config.compiles(self.device.ampere, self.spec.has_experts),
            "optimizer": self.config.optimizer.type,
            "sharing": [self.config.model_topo.sequence, self.config.model_topo.tensor],
            **{key: settings.get(key) for key in DEPENDS},
        }

    def once(self, find: Callable[..., Found], *case: object) -> Found:
        """Return `find(spec, *case)`, computed once for all that is derived from this basis."""
        asked = find, *case
        if asked not in self.known:
            self.known[asked] = find(self.spec, *case)
        found: Found = self.known[asked]
        return found

    @cached_property
    def computed_again(self) -> frozenset[int]:
        """Layers that recompute: blocks, and the first one in its tower of images."""
        if self.recompute is not None:
            return self.recompute
        trains_tower = any(name.startswith(f"{EYES}.") for name in self.trained_names[0])
        return self.config.recomputed(self.spec.n_blocks, trains_tower)

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """Blocks that recompute."""
        return self.computed_again - {0}

    @property
    def in_fp8(self) -> bool:
        """Return whether the linear layers of the blocks multiply in fp8, which the device must support."""
        return self.config.fp8.enabled and self.device.fp8 > 0

    @property
    def schedule(self) -> Schedule:
        """The schedule of the stages; 1f1b where there is only one."""
        return "dualpipev" if self.config.v_schedule else "1f1b"

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one replica in a step."""
        return max(self.workload.micro_batches, self.config.least_micro_batches)

    @property
    def measured_links(self) -> Links | None:
        """Links measured for this number of stages and replicas."""
        return self.links if self.links and not self.named and self.links.fits(self.config.model_topo) else None

    @property
    def fabric(self) -> Fabric:
        return self.named or Fabric.of(self.device)

    @cached_property
    def share(self) -> Workload:
        """One rank's share of the workload under sequence parallelism."""
        return self.workload.shared(self.config.model_topo.sequence)

    @property
    def row_chunks(self) -> int:
        """Chunks that the rows of a micro-batch pass in, on average; 1 where they pass whole."""
        return len(self._cuts(ceil(self.workload.length), self.workload.attended))

    @property
    def longest_chunks(self) -> tuple[int, ...]:
        """Tokens of each chunk of the longest rows, one document each."""
        return self._cuts(self.share.longest, self.share.longest)

    def _cuts(self, length: int, document: float) -> tuple[int, ...]:
        """Return the tokens of each chunk of rows that are filled with documents of this length."""
        chunk = chunk_of(self.config)
        if chunk is None:
            return (length,)
        return self.once(cut, chunk, self.config.max_seq_len, self.workload.rows, length, min(length, ceil(document)))

    def shapes(self, layer: int) -> dict[str, torch.Size]:
        """Return shapes of a layer's weights, or of one rank's shards of them."""
        return self.once(part_shapes, layer, self.config.model_topo.tensor)

    @cached_property
    def parameters(self) -> list[int]:
        """Parameters of each layer on one rank."""
        return [sum(map(prod, self.shapes(layer).values())) for layer in range(self.spec.n_layers)]

    @cached_property
    def trained(self) -> list[int]:
        """Parameters of each layer that are trained, on one rank."""
        return [sum(self._sizes(layer, names)) for layer, names in enumerate(self.trained_names)]

    @cached_property
    def trained_names(self) -> list[list[str]]:
        """Names of each layer's weights that are trained."""
        return [self.once(ModelSpec.trained_names, layer) for layer in range(self.spec.n_layers)]

    @cached_property
    def packed(self) -> list[list[int]]:
        """Sizes of each layer's weights that are held in 4 or 8 bits, on one rank."""
        names = [self.once(ModelSpec.packed_names, layer) for layer in range(self.spec.n_layers)]
        return [self._sizes(layer, of_layer) for layer, of_layer in enumerate(names)]

    def _sizes(self, layer: int, names: Iterable[str]) -> list[int]:
        shapes = self.shapes(layer)
        return [prod(shapes[name]) for name in names]

    def transfers(self, size: float) -> list[float]:
        """Return seconds of a message of `size` bytes from each stage to the next."""
        if self.measured_links:
            return [link.seconds(size) for link in self.measured_links.stages]
        if self.device.each and not self.named:
            ends = [Fabric.of(device).inside for device in self.of_stages]
            return [max(one.seconds(size), next_.seconds(size)) for one, next_ in pairwise(ends)]
        return [link.seconds(size) for link in self.fabric.to_next(self.config.model_topo)]

    @property
    def sums_bandwidth(self) -> float:
        """Bytes/s that a rank sends while the replicas of a stage sum gradients."""
        links = self.measured_links
        if links and links.sums:
            return min(link.bandwidth for link in links.sums)
        return self.fabric.group(self.config.model_topo.along("data")).bandwidth

    def in_chunks_of(self, tokens: int | None) -> Basis:
        """Let rows pass in chunks of so many tokens, or whole."""
        return replace(self, config=self.config.model_copy(update={KEY: tokens}))

    def changed(self, **keys: Any) -> Basis:
        """Change keys of the config; a step keeps its tokens, and the number of micro-batches follows."""
        config, work = self.config.model_copy(update=keys), self.workload
        if "max_seq_len" in keys:
            ratio = min(1.0, config.sample_limit / work.longest)
            shorter = replace(
                work,
                length=work.length * ratio,
                longest=min(work.longest, config.sample_limit),
                attended=min(work.attended, config.max_seq_len),
                micro_batches=max(1, round(work.micro_batches / ratio)),
                images=work.images.times(ratio),
            )
            return replace(self, config=config, workload=shorter)
        rows, micro_batches = divide_rows(work.rows * work.micro_batches * self.config.model_topo.row_replicas, config)
        images = work.images.times(rows / work.rows)
        return replace(
            self, config=config, workload=replace(work, rows=rows, micro_batches=micro_batches, images=images)
        )


def layer_kinds(spec: ModelSpec) -> list[int]:
    """Return for each layer the first one like it: same weights, same kind of attention."""
    first: dict[object, int] = {}
    kinds = []
    for number in range(spec.n_layers):
        is_block = 0 < number < spec.n_layers - 1
        kind = attention_kind(spec.config, number - 1) if is_block else number
        kinds.append(first.setdefault((kind, tuple(spec.shapes(number).items())), number))
    return kinds
