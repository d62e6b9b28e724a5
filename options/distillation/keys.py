"""The section `distillation` of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from training.config.keys import TrainConfig
from training.config.section import PathText, Section

if TYPE_CHECKING:
    from training.objective import Objective

KEY = "distillation"


class DistillationSection(Section):
    """`distillation`: learn from the probabilities of a larger model too (docs/distillation.md)."""

    teacher: PathText
    """The teacher: a model folder of either layout, a run, or a name on the HuggingFace hub, as in `model_path`, of the
    same vocabulary. Before the first step it is loaded alone, divided among the processes of this run, says what it
    finds of each trained token, and leaves the memory (docs/distillation.md)."""

    top_k: int = Field(default=64, ge=1)
    """How many words of each trained token the teacher's probabilities are kept of, the most probable ones; 8 bytes
    each, in `cache_dir`."""

    weight: float = Field(default=1.0, gt=0, le=1)
    """The share of the distillation in the loss; that of the cross-entropy is 1 minus it."""

    temperature: float = Field(default=1.0, gt=0)
    """What the logits of teacher and student are divided by before they are compared; above 1 the less probable words
    count more."""


class DistillationKeys(TrainConfig):
    """A run that may learn from a teacher."""

    distillation: DistillationSection | None = None

    @property
    def objective(self) -> Objective:
        if self.distillation is None:
            return super().objective
        from options.distillation.objective import Distillation

        return Distillation(self, self.distillation)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.distillation:
            return
        for key in self.objective_keys:
            if key != KEY:
                what = f"a teacher says what comes next, and {key} has a loss of its own"
                yield f"distillation: {what}; expected one of them"
        if key := self.windows_key:
            what = "a teacher reads all records before the first step"
            yield f"{key}: {what}; expected no {key}, or no distillation"
        if self.weights_on_host:
            yield f"distillation: not with schedule: {self.schedule}; expected none, or another schedule"
