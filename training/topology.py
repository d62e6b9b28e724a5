"""Which stage holds which layers, and over how many replicas: all that a checkpoint's files depend on.

A run builds its topology once, when `parts` is resolved; a checkpoint records it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pydantic import BaseModel, ConfigDict

from common.quantities import counted


class Topology(BaseModel):
    """How model and optimizer state are divided over processes, and so over files.

    Attributes:
        parts: layers per stage, or per chunk if each stage holds two; empty under plain ZeRO.
        tensor: processes that share each layer (tensor parallelism).
        spread: whether they share its experts too (expert parallelism).
        sequence: replicas that share each sequence. Files do not depend on it, but each rank's random numbers do.
    """

    model_config = ConfigDict(extra="forbid")

    stages: int
    replicas: int
    zero_stage: int
    parts: list[int]
    tensor: int = 1
    spread: bool = False
    sequence: int = 1

    @property
    def v_schedule(self) -> bool:
        """Return whether each stage holds two chunks (`schedule: dualpipev`)."""
        return len(self.parts) > self.stages

    def stage_of(self, layer: int) -> int:
        """Return the stage that holds a layer; of chunks 0 to 2P - 1, stage s of P has s and 2P - 1 - s."""
        chunk = sum(layer >= bound for bound in accumulate(self.parts[:-1]))
        return min(chunk, len(self.parts) - 1 - chunk) if self.v_schedule else chunk

    def layers(self, stage: int, n_layers: int) -> list[int]:
        """Return the layers of a stage, for a model of `n_layers`."""
        return [layer for layer in range(n_layers) if self.stage_of(layer) == stage]

    @property
    def description(self) -> str:
        """Stages and layers, for the log."""
        if not self.parts:
            return f"under ZeRO stage {self.zero_stage}"
        return f"in {counted(self.stages, 'stage')} of {self.parts}{', V schedule' if self.v_schedule else ''}"

    @property
    def full_description(self) -> str:
        """All fields, for a log that compares two topologies."""
        zero = f", ZeRO stage {self.zero_stage}" if self.parts else ""
        wide = f", {self.tensor} processes to a layer" if self.tensor > 1 else ""
        wide += ", experts spread" if self.spread else ""
        wide += f", {self.sequence} to a row" if self.sequence > 1 else ""
        return f"{self.description}{zero}, {counted(self.replicas, 'replica')}{wide}"


@dataclass(frozen=True)
class Division:
    """How a run's model is divided: as the config says, or by a planner; a trainer of an option may need more.

    Attributes:
        recompute: numbers, in the whole model, of the layers that recompute their activations.
        report: lines for the log with the resolved `auto` values.
    """

    topology: Topology
    recompute: frozenset[int] = frozenset()
    report: tuple[str, ...] = ()


def layer_ranges(parts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the layers of each part, begin and end, from their numbers."""
    return list(pairwise([0, *accumulate(parts)]))


def even_parts(layers: int, chunks: int, first: int) -> list[int]:
    """Divide layers evenly; the first chunk has at least `first`."""
    size, rest = divmod(layers, chunks)
    if size + (rest > 0) >= first:
        return [size + (chunk < rest) for chunk in range(chunks)]
    return [first, *even_parts(layers - first, chunks - 1, 1)]
