"""What DeepSpeed's checkpoint files hold of the optimizer's state, weight by weight.

The counterpart of `training.checkpoint.live_shards` on disk. The files are mapped into memory and not read: a slice
costs nothing until somebody copies from it, and then no more than itself. They are read with `weights_only`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from models.checkpoint.layout import layer_file
from models.errors import CheckpointError
from training.checkpoint.deepspeed_files import read_mapped
from training.topology import Topology

MASTER = "fp32"  # the weight itself, beside the optimizer's own names such as exp_avg


@dataclass(frozen=True)
class SavedSlice:
    """A range of a weight's elements with its state.

    Attributes:
        name: `<layer>.<name>` of the weight.
        offset: where the range begins in the flattened weight.
        numel: how many elements it has.
        states: by name, flat where a state has an element for each of the weight's, else as it was.
        step: how often the optimizer updated it; None where the optimizer does not count.
    """

    name: str
    offset: int
    numel: int
    states: dict[str, Tensor]
    step: float | None


class SavedOptimizer:
    """The optimizer's state in a checkpoint folder.

    Args:
        topology: how the checkpoint's record says it is divided.
    """

    def __init__(self, folder: Path, topology: Topology) -> None:
        self.folder = folder
        self.topology = topology

    def loss_scaler(self) -> Any:
        """The loss scale of an fp16 run, which always has ZeRO."""
        return read_mapped(self._shards(0)[0])["optimizer_state_dict"]["loss_scaler"]

    def stage_of(self, name: str) -> int:
        """The stage of the pipeline that had a weight; 0 under plain ZeRO."""
        return self.topology.stage_of(_layer(name))

    def slices(self, stage: int) -> Iterator[SavedSlice]:
        """Everything that the replicas of a stage kept.

        Raises:
            CheckpointError: a file is missing, cannot be read or is laid out in another way.
        """
        shards = self._shards(stage)
        try:
            if self.topology.zero_stage == 3:
                yield from self._of_stage_3(shards)
            elif shards:
                yield from self._of_ranges(shards)
            else:
                yield from self._of_whole(self._model_file(stage))
        except CheckpointError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.folder}: the optimizer's files of stage {stage} are not laid out as expected: "
                f"{type(error).__name__}: {error}"
            ) from None

    def _of_ranges(self, shards: list[Path]) -> Iterator[SavedSlice]:
        """ZeRO 1 and 2 and the bf16 optimizer: each replica has the next range of the weights that were joined."""
        seen: Counter[str] = Counter()
        for path in shards:
            saved = read_mapped(path)["optimizer_state_dict"]
            masters, places = saved["single_partition_of_fp32_groups"], saved["param_slice_mappings"]
            for number, (master, weights) in enumerate(zip(masters, places, strict=True)):
                state = _State(saved["base_optimizer_state"], number, master)
                for name, place in weights.items():
                    yield state.slice(name, seen[name], place.start, place.numel)
                    seen[name] += place.numel

    def _of_stage_3(self, shards: list[Path]) -> Iterator[SavedSlice]:
        """ZeRO 3: each rank has a range of every weight, padded to the same length."""
        shapes = read_mapped(self._model_file(0))["param_shapes"]
        for rank, path in enumerate(shards):
            saved = read_mapped(path)["optimizer_state_dict"]
            for number, (master, weights) in enumerate(zip(saved["fp32_flat_groups"], shapes, strict=True)):
                state = _State(saved["optimizer_state_dict"], number, master)
                start = 0
                for name, shape in weights.items():
                    share = math.ceil(shape.numel() / len(shards))
                    offset = share * rank
                    yield state.slice(name, offset, start, max(0, min(share, shape.numel() - offset)))
                    start += share

    def _of_whole(self, path: Path) -> Iterator[SavedSlice]:
        """Without ZeRO: weight by weight, under the names that `training.checkpoint.saving` adds."""
        file = read_mapped(path)
        saved, names = file["optimizer"], file["parameter_names"]
        if "fp32_groups" in saved:  # of a run in 16 bits
            masters, saved = list(chain.from_iterable(saved["fp32_groups"])), saved["optimizer_state_dict"]
        else:
            masters = self._weights(names)
        for number, (name, master) in enumerate(zip(names, masters, strict=True)):
            yield _State(saved, number, master).slice(name, 0, 0, master.numel())

    def _weights(self, names: list[str]) -> list[Tensor]:
        """The weights themselves, from the layer files."""
        layers = {layer: read_mapped(self.folder / layer_file(layer)) for layer in {_layer(name) for name in names}}
        return [layers[_layer(name)][name.partition(".")[2]] for name in names]

    def _shards(self, stage: int) -> list[Path]:
        """The optimizer's files of a stage, one a replica; none where DeepSpeed put all into the model's file."""
        for prefix in ("", "bf16_"):
            names = [
                f"{prefix}zero_pp_rank_{replica}_mp_rank_{stage:02d}_optim_states.pt"
                for replica in range(self.topology.replicas)
            ]
            if (self.folder / names[0]).is_file():
                return [self.folder / name for name in names]
        return []

    def _model_file(self, stage: int) -> Path:
        prefix = "zero_pp_rank_0_" if self.topology.zero_stage == 3 else ""
        return self.folder / f"{prefix}mp_rank_{stage:02d}_model_states.pt"


class _State:
    """What the optimizer keeps under one number: a weight, or a vector of several."""

    def __init__(self, saved: dict[str, Any], number: int, master: Tensor) -> None:
        kept = saved["state"].get(number, {})
        step = kept.get("step")
        self._step = None if step is None else float(step)
        self._states = {name: state for name, state in kept.items() if isinstance(state, Tensor) and state.dim()}
        self._master = master

    def slice(self, name: str, offset: int, start: int, numel: int) -> SavedSlice:
        """The elements from `start` on, which are those of a weight from `offset` on."""
        states = {
            # The states may have padding at their end that the weights lost; Adafactor's have fewer elements.
            key: state.view(-1)[start : start + numel] if state.numel() >= self._master.numel() else state
            for key, state in ((MASTER, self._master), *self._states.items())
        }
        return SavedSlice(name, offset, numel, states, self._step)


def _layer(name: str) -> int:
    return int(name.partition(".")[0])
