"""The planner's keys, and who resolves what is `auto`."""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import Self

from training.config.contradictions import from_own_checkpoint
from training.config.keys import TrainConfig


class PlannerKeys(TrainConfig):
    """A run that is planned."""

    rebalance: bool = False
    """With `parts: auto`: restart all processes in better parts after the next checkpoint, where the first steps
    show that they fit and make a step at least 3 % faster (docs/parallelism.md#plan-before-you-train); needs
    `save_interval` or `save_minutes`."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.rebalance:
            return
        for unlike, expected in (
            (self.model_topo.stages == 1, "several stages"),
            (self.model_topo.parts is not None, "model_topo.parts: auto"),
            *from_own_checkpoint(self, "to move at a checkpoint"),
            (self.storage == "local", "storage: shared, as layers move to other hosts"),
            (self.deterministic, "deterministic: false, as sums depend on parts, and these on measured times"),
        ):
            if unlike:
                yield f"rebalance: expected {expected}, or rebalance: false"

    @property
    def is_planned(self) -> bool:
        return True

    def with_parts(self, parts: list[int]) -> Self:
        return super().with_parts(parts).model_copy(update={"rebalance": False})
