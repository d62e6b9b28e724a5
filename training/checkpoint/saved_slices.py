"""List the optimizer's state in a checkpoint's files as slices of the weights.

DeepSpeed's optimizers shard the weights in different ways: ZeRO 1 and 2 and the bf16 optimizer join a group's weights
into one vector and give each replica a range of it; ZeRO 3 gives each rank a range of every weight, as an option's
trainer may do to each stage; without ZeRO they stay whole. Here all become lists of slices;
`training.checkpoint.resharding` lists those of an engine.

The files are mapped, so a slice costs nothing until it is copied. Files on another host's disk are skipped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.layout import layer_file
from models.errors import CheckpointError
from models.parallel.groups import RankGroup
from models.parallel.shard import Shard
from models.parallel.tensor import TensorShare
from models.spec import ModelSpec
from training.checkpoint.deepspeed_files import read_mapped
from training.topology import Topology


@dataclass(frozen=True)
class Slice:
    """A range of a weight's elements, with the optimizer's state for them.

    Attributes:
        name: `<layer>.<name>` of the weight.
        offset: where the range begins in the flattened weight.
        numel: how many elements it has.
        master: the tensor that holds the range in fp32: this weight, or several that were joined.
        start: where the range begins in the flattened master.
        state: the optimizer's, of the whole master.
        shard: with tensor parallelism, the shard of the weight in which offset and numel count.
        states_in: the dtype of its averages, if it is another than the master's.
    """

    name: str
    offset: int
    numel: int
    master: Tensor
    start: int
    state: dict[str, Any]
    shard: Shard | None = None
    states_in: torch.dtype | None = None


@dataclass(frozen=True)
class SavedOptimizer:
    """The optimizer's state in a checkpoint folder.

    Attributes:
        topology: of the run that saved it.
        spec: of a language model; says how tensor parallelism shards its layers.
    """

    folder: Path
    topology: Topology
    spec: ModelSpec | None = None

    def loss_scaler(self) -> Any:
        """Read the loss scale of an fp16 run: of ZeRO's files, or without ZeRO of the model's."""
        places = range(self.topology.stages * self.topology.tensor)
        shards = list(chain.from_iterable(self._shards(place).values() for place in places))
        whole = (path for path in map(self._model_file, places) if path.is_file())
        file = read_mapped(shards[0] if shards else next(whole))
        return file["optimizer_state_dict" if shards else "optimizer"]["loss_scaler"]

    @cached_property
    def in_pieces(self) -> bool:
        """Whether each stage's process had a piece of every weight: its file then names those of other stages too."""
        if self.topology.zero_stage:
            return False
        stages = self.topology.stages
        paths = [self._model_file(stage * self.topology.tensor) for stage in range(stages)]
        named = [read_mapped(path).get("parameter_names", []) if path.is_file() else [] for path in paths]
        return any(map(self._elsewhere, range(stages), named))

    def _elsewhere(self, stage: int, names: Sequence[str]) -> bool:
        return any(self.topology.stage_of(layer_of(name)) != stage for name in names)

    def slices(self, stage: int) -> Iterator[Slice]:
        """Yield the state of a stage's replicas that is on this disk; what several processes have, once."""
        try:
            for part, place in enumerate(self._places(stage)):
                ranks, shards = RankGroup(self.topology.tensor, part), self._shards(place)

                # A weight that the processes share in full is in the files of the first.
                share = TensorShare(self.spec, ranks, self.topology.spread) if self.spec else None
                for piece in self._of_place(place, shards, share):
                    if shard := share.shard(piece.name) if share else None:
                        yield replace(piece, shard=shard)
                    elif part == 0:
                        yield piece
        except CheckpointError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.folder}: the optimizer's files of stage {stage} are not laid out as expected: "
                f"{type(error).__name__}: {error}"
            ) from None

    def _of_place(self, place: int, shards: dict[int, Path], share: TensorShare | None) -> Iterator[Slice]:
        if self.topology.zero_stage == 3:
            return self._of_stage_3(shards)
        return self._of_ranges(shards) if shards else self._of_whole(self._model_file(place), share)

    def _of_ranges(self, shards: dict[int, Path]) -> Iterator[Slice]:
        seen: Counter[str] = Counter()
        for path in shards.values():
            file = read_mapped(path)
            saved, offsets = file["optimizer_state_dict"], file.get("offsets", seen)  # seen: of an early version
            masters, places = saved["single_partition_of_fp32_groups"], saved["param_slice_mappings"]
            for number, (master, weights) in enumerate(zip(masters, places, strict=True)):
                state = saved["base_optimizer_state"]["state"].get(number, {})
                for name, place in weights.items():
                    yield Slice(name, offsets[name], place.numel, master, place.start, state)
                    seen[name] += place.numel

    def _of_stage_3(self, shards: dict[int, Path]) -> Iterator[Slice]:
        shapes = read_mapped(self._model_file(0, next(iter(shards), 0)))["param_shapes"]
        for rank, path in shards.items():
            saved = read_mapped(path)["optimizer_state_dict"]
            for number, (master, weights) in enumerate(zip(saved["fp32_flat_groups"], shapes, strict=True)):
                state = saved["optimizer_state_dict"]["state"].get(number, {})
                sizes = [(name, shape.numel()) for name, shape in weights.items()]
                yield from equal_shares(sizes, rank, self.topology.replicas, master, state)

    def _of_whole(self, path: Path, share: TensorShare | None) -> Iterator[Slice]:
        """Without ZeRO: weight by weight, under the names that `training.checkpoint.saving` adds."""
        file = read_mapped(path)
        saved, names, pieces = file["optimizer"], file["parameter_names"], file.get("pieces")
        if "fp32_groups" in saved:  # of a run in 16 bits; else the weights themselves
            masters, saved = list(chain.from_iterable(saved["fp32_groups"])), saved["optimizer_state_dict"]
        else:
            layers = {layer: read_mapped(self.folder / layer_file(layer)) for layer in set(map(layer_of, names))}
            masters = [layers[layer_of(name)][name.partition(".")[2]] for name in names]
            shards = [share.shard(name) if share else None for name in names]
            masters = [
                shard.of(each).contiguous() if shard else each for shard, each in zip(shards, masters, strict=True)
            ]
            if pieces:
                ranges = [slice(begin, begin + numel) for begin, numel in pieces]
                masters = [each.view(-1)[piece] for each, piece in zip(masters, ranges, strict=True)]
        offsets = [begin for begin, _ in pieces] if pieces else [0] * len(names)  # none: of an early version
        for number, (name, offset, master) in enumerate(zip(names, offsets, masters, strict=True)):
            yield Slice(name, offset, master.numel(), master, 0, saved["state"].get(number, {}))

    def files_elsewhere(self, stage: int) -> list[Path]:
        """List a stage's optimizer files that are on other hosts' disks."""
        return list(chain.from_iterable(self._shards(place, here=False).values() for place in self._places(stage)))

    def _places(self, stage: int) -> range:
        """Return the numbers in the file names of a stage's processes, one replica's."""
        return range(stage * self.topology.tensor, (stage + 1) * self.topology.tensor)

    def _shards(self, place: int, here: bool = True) -> dict[int, Path]:
        """Return a process's optimizer files by replica; none if DeepSpeed put all into the model's file."""
        for prefix in ("", "bf16_"):
            name = f"{prefix}zero_pp_rank_{{}}_mp_rank_{place:02d}_optim_states.pt".format
            paths = {replica: self.folder / name(replica) for replica in range(self.topology.replicas)}
            if any(path.is_file() for path in paths.values()):
                return {replica: path for replica, path in paths.items() if path.is_file() == here}
        return {}

    def _model_file(self, place: int, replica: int = 0) -> Path:
        prefix = f"zero_pp_rank_{replica}_" if self.topology.zero_stage == 3 else ""
        return self.folder / f"{prefix}mp_rank_{place:02d}_model_states.pt"


def equal_shares(
    sizes: Iterable[tuple[str, int]], rank: int, ranks: int, master: Tensor, state: dict[str, Any]
) -> Iterator[Slice]:
    """Yield a rank's slices under ZeRO 3: equal ranges of each weight, given by name and number of elements."""
    start = 0
    for name, size in sizes:
        share = math.ceil(size / ranks)  # padded on the last ranks
        offset = share * rank
        yield Slice(name, offset, max(0, min(share, size - offset)), master, start, state)
        start += share


def layer_of(name: str) -> int:
    """Return the number of the layer that has a weight, given its name."""
    return int(name.partition(".")[0])
