"""The objective of `distillation`: fine-tuning that compares with a teacher's most probable words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from data.sample_set import SampleSet
from models.spec import ModelSpec
from options.distillation.collation import TaughtCollation
from options.distillation.loss import DistillationLoss
from training.callbacks import Callback
from training.errors import ConfigError
from training.fine_tuning import FineTuning
from training.objective import Formula, ModelAndRecords

if TYPE_CHECKING:
    from options.distillation.keys import DistillationSection
    from training.config.keys import TrainConfig


class Distillation(FineTuning):
    """Learn what the teacher says of each trained token, and the token itself."""

    sees = False

    def __init__(self, config: TrainConfig, section: DistillationSection) -> None:
        super().__init__(config)
        self.section = section

    def collation(self, data: SampleSet) -> TaughtCollation:
        return TaughtCollation(data)

    def other_models(
        self, spec: ModelSpec, folder: Path, read_spec: Callable[[Path], ModelSpec], weights: bool = True
    ) -> dict[str, tuple[Path, ModelSpec]]:
        from options.distillation.teacher import TEACHER, read_teacher

        return {TEACHER: read_teacher(self.config, self.section, spec, folder, read_spec, weights)}

    def loss(self, router_loss_weight: float) -> DistillationLoss:
        mix = self.section.weight, self.section.temperature
        return DistillationLoss(*mix, self.config.aux_max_z_loss.weight, router_loss_weight)

    def callbacks(self, task: ModelAndRecords) -> list[Callback]:
        from options.distillation.teaching import Teaching  # imports DeepSpeed, so only in a run

        return [Teaching(task, self.section)]

    def logit_copies(self, on_gpu: bool) -> int:
        return 1 if on_gpu and self.section.temperature != 1 else 0  # the exponentials at that temperature

    def unplanned(self) -> list[str]:
        return [f"distillation: the pass of {self.section.teacher} before the first step is not planned"]

    def formula(self) -> Formula:
        raise ConfigError("--prove: no distillation; expected distillation=null beside it, to prove all other keys")
