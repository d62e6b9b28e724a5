"""The objectives of models that give a text numbers: a reward for an answer, or one for each class."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from data.records.pairs import Wanted
from data.sample_set import SampleSet
from models.process_groups import RankGroup
from models.spec import ModelSpec
from options.preference.collation import JudgedCollation
from options.preference.losses import RIGHT, UNPRINTED
from options.scores.formula import ClassesFormula, RewardsFormula
from options.scores.loss import ACCURACY, ScoreLoss
from training.callbacks import Callback
from training.measures import Measures
from training.objective import Formula, Objective

if TYPE_CHECKING:
    from training.language_model import LanguageModel


class Scores(Objective):
    """Learn numbers of whole texts; the loss is a mean over samples."""

    best_by = "eval_error"
    says_words = False

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Name the numbers."""

    def collation(self, data: SampleSet) -> JudgedCollation:
        return JudgedCollation(data)

    def model(self, spec: ModelSpec) -> ModelSpec:
        return spec.scoring(self.names)

    def callbacks(self, task: LanguageModel) -> list[Callback]:
        return [Measures(self.right)]


class Reward(Scores):
    """Learn that the better of two answers scores higher (`preference.loss: reward`)."""

    key, right, unprinted = "preference", RIGHT, UNPRINTED
    documents, unit = 2, "answer"

    @property
    def names(self) -> list[str]:
        return ["reward"]

    @property
    def wanted(self) -> Wanted:
        return Wanted("rewards")

    @property
    def _center_weight(self) -> float:
        assert self.config.preference
        return self.config.preference.center_weight

    def loss(self, router_loss_weight: float, rows: RankGroup) -> ScoreLoss:
        return ScoreLoss(True, self._center_weight, router_loss_weight, rows)

    def formula(self) -> Formula:
        return RewardsFormula(self._center_weight)


class Classes(Scores):
    """Learn the class of each text (`labels`)."""

    key, right = "labels", ACCURACY

    @property
    def names(self) -> list[str]:
        return self.config.labels

    @property
    def wanted(self) -> Wanted:
        return Wanted("classes", tuple(self.names))

    def loss(self, router_loss_weight: float, rows: RankGroup) -> ScoreLoss:
        return ScoreLoss(False, 0.0, router_loss_weight, rows)

    def formula(self) -> Formula:
        return ClassesFormula()
