"""The objectives of models that give a text numbers: a reward for an answer, or one for each class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data.sample_set import SampleSet
from data.settings import Wanted
from models.spec import ModelSpec
from options.preference.collation import JudgedCollation
from options.preference.losses import MARGIN, RIGHT, UNPRINTED
from options.scores.formula import ClassesFormula, RewardsFormula
from options.scores.loss import ACCURACY, ScoreLoss
from training.callbacks import Callback
from training.measures import Measures
from training.objective import Formula, ModelAndRecords, Objective

if TYPE_CHECKING:
    from training.config.keys import TrainConfig


class Scores(Objective):
    """Learn numbers of whole texts; the loss is a mean over samples.

    Attributes:
        names: of the numbers.
    """

    best_by = "eval_error"
    says_words = False

    def __init__(self, config: TrainConfig, names: list[str]) -> None:
        super().__init__(config)
        self.names = names

    def collation(self, data: SampleSet) -> JudgedCollation:
        return JudgedCollation(data)

    def model(self, spec: ModelSpec) -> ModelSpec:
        return spec.scoring(self.names)

    def callbacks(self, task: ModelAndRecords) -> list[Callback]:
        return [Measures(self.right)]


class Reward(Scores):
    """Learn that the better of two answers scores higher (`preference.loss: reward`)."""

    right, unprinted = RIGHT, UNPRINTED
    printed = {"accuracy": RIGHT, "margin": MARGIN}
    documents, unit = 2, "answer"

    def __init__(self, config: TrainConfig, center_weight: float) -> None:
        super().__init__(config, ["reward"])
        self._center_weight = center_weight

    @property
    def rate_share(self) -> float:
        return 0.5  # 9e-6 at 6B in arXiv:2203.02155, appendix C

    @property
    def wanted(self) -> Wanted:
        return Wanted("rewards")

    def loss(self, router_loss_weight: float) -> ScoreLoss:
        return ScoreLoss(True, self._center_weight, router_loss_weight)

    def formula(self) -> Formula:
        return RewardsFormula(self._center_weight)


class Classes(Scores):
    """Learn the class of each text (`labels`)."""

    right, printed = ACCURACY, {"accuracy": ACCURACY}

    @property
    def wanted(self) -> Wanted:
        return Wanted("classes", tuple(self.names))

    def loss(self, router_loss_weight: float) -> ScoreLoss:
        return ScoreLoss(False, 0.0, router_loss_weight)

    def formula(self) -> Formula:
        return ClassesFormula()
