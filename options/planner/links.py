"""The links between the processes of a run, as measured: links.json in its folder, for `--plan` and `parts: auto`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, PositiveFloat

from common.whole_files import Tell, kept, read_regular, replace_text
from training.config.model_topo import ModelTopo

FILE = "links.json"


class Link(BaseModel):
    """A link between two stages, or among the replicas of one.

    Attributes:
        latency: seconds of the shortest message.
        bandwidth: bytes/s; of an all-reduce, of what each process sends.
    """

    latency: Annotated[float, Field(ge=0)]
    bandwidth: PositiveFloat

    def seconds(self, size: float) -> float:
        """Return the seconds of a message of `size` bytes."""
        return self.latency + size / self.bandwidth


class Links(BaseModel):
    """The measured links of a run.

    Attributes:
        hosts: of each rank.
        stages: from each stage to the next; the slowest of the replicas.
        sums: among the replicas of each stage; empty with one replica.
    """

    hosts: list[str]
    stages: list[Link]
    sums: list[Link]

    @classmethod
    def read(cls, folder: Path, tell: Tell) -> Links | None:
        """Read those that an earlier `--check` left in the run's folder; None if missing or damaged."""
        return kept(folder / FILE, cls.model_validate_json, read_regular, tell)

    def write(self, folder: Path) -> None:
        """Write them into the run's folder, atomically."""
        replace_text(folder / FILE, self.model_dump_json(indent=2) + "\n")

    def fits(self, topology: ModelTopo) -> bool:
        """Return whether they are of a run with as many stages and replicas."""
        sums = topology.stages if topology.replicas > 1 else 0
        return len(self.stages) == topology.stages - 1 and len(self.sums) == sums
