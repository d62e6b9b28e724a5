"""The objective of `mtp`: fine-tuning, with layers ahead that learn to draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data.sample_set import SampleSet
from models.ahead.layers import Ahead
from models.ahead.model import ahead_alone, looking_ahead, usable_ahead, with_new_layers
from models.checkpoint.hub import find_model
from models.config_json import count_ahead
from models.errors import CheckpointError
from models.spec import ModelSpec
from options.multi_token.collation import AheadCollation
from options.multi_token.formula import AheadFormula
from options.multi_token.loss import AheadLoss
from training.callbacks import Callback
from training.errors import ConfigError
from training.fine_tuning import FineTuning
from training.objective import Formula, ModelAndRecords

if TYPE_CHECKING:
    from options.multi_token.keys import DraftSection
    from training.config.keys import TrainConfig


class MultiToken(FineTuning):
    """Learn to say what the records say, and to draft it some tokens ahead."""

    printed = {"mtp": "mtp_loss"}
    looks_ahead = True
    sees = False
    by_token = False  # its targets lie behind the next chunk's beginning

    def __init__(self, config: TrainConfig, section: DraftSection) -> None:
        super().__init__(config)
        self.section = section

    def model(self, spec: ModelSpec) -> ModelSpec:
        """Add the layers ahead to the model.

        Raises:
            ConfigError: it has none, or fewer than `depth`, or has some where new ones are asked for.
        """
        path, depth = self.config.model_path, self.section.depth
        folder = find_model(path, weights=False)
        try:
            found = usable_ahead(folder, spec)
        except CheckpointError as error:
            raise ConfigError(f"mtp: {error}") from None
        if found and self.section.init and not spec.family.ahead:
            raise ConfigError(f"mtp.init: copy, but {path} has such layers; expected no init, which trains them")
        if self.section.init and not found:
            made = with_new_layers(spec, depth or 1)
        elif found is None and count_ahead(spec.fields):
            raise ConfigError(f"mtp: {path} names its layers ahead in a way that is not known; expected no mtp")
        elif found is None:
            raise ConfigError(f"mtp: {path} has no layers that predict ahead; expected init: copy, which makes some")
        elif depth and depth > found.depth:
            raise ConfigError(f"mtp.depth: {depth}, but {path} has {found.depth}; expected at most that")
        else:
            made = looking_ahead(spec, Ahead(found.naming, depth or found.depth))
        return ahead_alone(made) if self.section.only else made

    def collation(self, data: SampleSet) -> AheadCollation:
        return AheadCollation(data)

    def loss(self, router_loss_weight: float) -> AheadLoss:
        section, z_loss_weight = self.section, self.config.aux_max_z_loss.weight
        return AheadLoss(section.weight, section.detach, section.only, z_loss_weight, router_loss_weight)

    def callbacks(self, task: ModelAndRecords) -> list[Callback]:
        from options.multi_token.drafting import Drafting  # imports DeepSpeed, so only in a run

        return [Drafting(task, self.section)]

    def formula(self) -> Formula:
        return AheadFormula(self.config.aux_max_z_loss.weight, self.section)
