"""The objectives of `preference`: pairs of answers, and single answers that are marked as desirable or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data.sample_set import SampleSet
from data.settings import Wanted
from options.preference.collation import JudgedCollation
from options.preference.formula import PairsFormula
from options.preference.losses import MARGIN, RIGHT, UNPRINTED, PairLoss, PreferenceLoss, UnpairedLoss
from training.callbacks import Callback
from training.errors import ConfigError
from training.objective import Formula, ModelAndRecords, Objective

if TYPE_CHECKING:
    from options.preference.keys import PreferenceSection
    from training.config.keys import TrainConfig


# Of fine-tuning's rate, 2e-5 at 7B: 5e-7 for DPO (Zephyr, arXiv:2310.16944), 6e-7 for SimPO (arXiv:2405.14734),
# 8e-6 for ORPO (arXiv:2403.07691); KTO's authors take DPO's (arXiv:2402.01306).
RATE_SHARES = {"simpo": 0.03, "orpo": 0.4}
RATE_SHARE = 0.025


class Answers(Objective):
    """Learn which answers are good; the loss is a mean over samples."""

    unit = "answer"
    unprinted = UNPRINTED
    sees = True

    def __init__(self, config: TrainConfig, section: PreferenceSection) -> None:
        super().__init__(config)
        self.section = section

    @property
    def rate_share(self) -> float:
        return RATE_SHARES.get(self.section.loss, RATE_SHARE)

    def collation(self, data: SampleSet) -> JudgedCollation:
        return JudgedCollation(data)

    def callbacks(self, task: ModelAndRecords) -> list[Callback]:
        from options.preference.reference import Preferences  # imports DeepSpeed, so only in a run

        return [Preferences(task, self.section, self.right)]


class PairedAnswers(Answers):
    """Learn which of two answers is better: DPO, cDPO, IPO, SimPO and ORPO."""

    documents = 2
    best_by = "eval_error"
    right, printed = RIGHT, {"accuracy": RIGHT, "margin": MARGIN}

    @property
    def wanted(self) -> Wanted:
        return Wanted("pairs")

    def loss(self, router_loss_weight: float) -> PreferenceLoss:
        return PreferenceLoss(PairLoss(**self.section.objective), router_loss_weight)

    def formula(self) -> Formula:
        return PairsFormula(self.section)


class MarkedAnswers(Answers):
    """Learn from answers by themselves, each desirable or not: KTO and APO-zero."""

    printed = {"margin": MARGIN}

    @property
    def wanted(self) -> Wanted:
        return Wanted("marked")

    def loss(self, router_loss_weight: float) -> UnpairedLoss:
        return UnpairedLoss(PairLoss(**self.section.objective), router_loss_weight)

    def unplanned(self) -> list[str]:
        if self.section.loss != "kto":
            return []
        return ["preference.loss: kto takes a forward pass more in each step, which is not planned"]

    def formula(self) -> Formula:
        raise ConfigError(f"--prove: preference.loss: {self.section.loss} has no formula here; expected one of pairs")
