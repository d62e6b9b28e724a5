"""Lay the processes out in a grid: `model_topo`."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

import numpy
from numpy.typing import NDArray
from pydantic import PositiveInt, field_validator, model_validator

from training.config.section import Section, expected

Axis = Literal["pipe", "data", "model"]


class ProcessTopology(Section):
    """`model_topo.process_topology`: the grid of processes."""

    axes: list[Axis] = ["pipe", "data"]
    """What the numbers in `dims` mean, in this order; neighbours along the last one are neighbouring processes. Over
    several machines, without the key, the order that crosses them least (docs/cluster.md#placement). `model`, the
    tensor axis, may be left out."""

    dims: list[PositiveInt] = [1, 1]
    """Stages and replicas; the product is the number of processes. `[8, 2]` is 16 processes, two replicas of an 8-stage
    pipeline. With `axes: [pipe, data, model]` the third one is how many processes share each layer."""

    @model_validator(mode="after")
    def _check(self) -> ProcessTopology:
        if sorted(self.axes) not in (["data", "pipe"], ["data", "model", "pipe"]):
            raise ValueError(f"axes: expected pipe and data, and model where layers are shared, found {self.axes}")
        if len(self.dims) != len(self.axes):
            raise ValueError(f"dims: expected one number for each of the axes {self.axes}, found {self.dims}")
        return self


class ModelTopo(Section):
    """`model_topo`: how the model is spread."""

    process_topology: ProcessTopology = ProcessTopology()
    sequence: PositiveInt = 1
    """How many neighbouring replicas share their rows, each with a part of the tokens, for rows too long for one. It
    divides the replicas (docs/parallelism.md#sequence-parallelism)."""

    experts: Literal["columns", "spread"] = "columns"
    """How processes that share layers share experts: each has a part of every one, or with `spread` some whole ones.
    Nothing changes but the time: whole ones make larger products, but all wait for the one whose experts got the most
    tokens."""

    parts: Annotated[list[PositiveInt] | None, expected("auto or a list of layers per stage")] = None
    """Layers of each stage: one entry a stage, which sum to blocks + 2. `auto`, or no key, finds the parts whose
    slowest stage is fastest (docs/parallelism.md#plan-before-you-train). `parts` at the top level is the same key."""

    @field_validator("parts", mode="before", json_schema_input_type=list[PositiveInt] | Literal["auto"] | None)
    @classmethod
    def _auto_is_none(cls, parts: Any) -> Any:
        return None if parts == "auto" else parts

    @model_validator(mode="after")
    def _check(self) -> ModelTopo:
        if self.replicas % self.sequence:
            raise ValueError(f"sequence: {self.sequence} does not divide the {self.replicas} replicas")
        if self.experts == "spread" and self.tensor == 1:
            raise ValueError("experts: spread is for processes that share layers; expected a model axis, or columns")
        return self

    @property
    def stages(self) -> int:
        return self._sizes["pipe"]

    @property
    def replicas(self) -> int:
        return self._sizes["data"]

    @property
    def row_replicas(self) -> int:
        """Count the replicas; those that share rows are one."""
        return self.replicas // self.sequence

    @property
    def tensor(self) -> int:
        """Count the processes that share each layer."""
        return self._sizes.get("model", 1)

    @property
    def processes(self) -> int:
        return prod(self.process_topology.dims)

    def stage_of(self, rank: int) -> int:
        """Return the stage of a process; the first axis changes slowest."""
        grid = self.process_topology
        return int(numpy.unravel_index(rank, grid.dims)[grid.axes.index("pipe")])

    def along(self, axis: Axis) -> NDArray[Any]:
        """Return the groups of ranks along an axis, [groups, size]."""
        grid = self.process_topology
        ranks = numpy.arange(self.processes).reshape(grid.dims)
        if axis not in grid.axes:
            return ranks.reshape(-1, 1)
        return numpy.moveaxis(ranks, grid.axes.index(axis), -1).reshape(-1, self._sizes[axis])

    def sharing(self, what: Literal["rows", "layers"]) -> NDArray[Any]:
        """Return the groups of ranks that share rows or layers, [groups, size]."""
        return self.along("model") if what == "layers" else self.along("data").reshape(-1, self.sequence)

    def first_peer(self, rank: int) -> int:
        """Return the first of the ranks that share this rank's layers."""
        return next(row[0] for row in self.sharing("layers").tolist() if rank in row)

    def spread(self, stages: int, replicas: int, tensor: int | None = None) -> ModelTopo:
        """Spread the same over other processes, with `parts: auto`.

        Args:
            tensor: how many share each layer, on a grid with that axis; None for as many as do.
        """
        sizes = self._sizes | {"pipe": stages, "data": replicas, "model": tensor or self.tensor}
        grid = self.process_topology.model_copy(update={"dims": [sizes[axis] for axis in self.process_topology.axes]})
        return self.model_copy(update={"parts": None, "process_topology": grid})

    def turned(self) -> ModelTopo:
        """Swap the axes of stages and replicas, and `dims` with them."""
        grid, sizes = self.process_topology, self._sizes
        other: dict[Axis, Axis] = {"pipe": "data", "data": "pipe"}
        axes = [other.get(axis, axis) for axis in grid.axes]
        turned = grid.model_copy(update={"axes": axes, "dims": [sizes[axis] for axis in axes]})
        return self.model_copy(update={"process_topology": turned})

    @property
    def _sizes(self) -> dict[Axis, int]:
        return dict(zip(self.process_topology.axes, self.process_topology.dims, strict=True))
