"""The section `preference` of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from training.config.keys import TrainConfig
from training.config.section import Section
from training.errors import ConfigError

if TYPE_CHECKING:
    from training.objective import Objective

KEY, REWARD = "preference", "reward"
BETA = 0.1
UNPAIRED = ("kto", "apo_zero_unpaired")


class PreferenceSection(Section):
    """`preference`: learn from pairs of answers, or from good and bad ones (docs/preferences.md)."""

    short_for: ClassVar[str | None] = "loss"

    loss: Literal["dpo", "cdpo", "ipo", "simpo", "orpo", "kto", "apo_zero_unpaired", "reward"] = "dpo"
    """`dpo` (arXiv:2305.18290), `cdpo` (dpo with `label_smoothing`), `ipo` (arXiv:2310.12036), `simpo`
    (arXiv:2405.14734) or `orpo` (arXiv:2403.07691); the last two need no reference model. `kto` (arXiv:2402.01306) and
    `apo_zero_unpaired` (arXiv:2408.06266) learn from single answers that are marked as desirable or not
    (docs/preferences.md#single-answers). `reward` trains a reward model, which gives an answer a number
    (docs/preferences.md#reward-models-and-classes)."""

    beta: float = Field(default=BETA, gt=0)
    """How much a difference of log-probabilities counts; for `orpo` the weight of its odds ratio. SimPO's authors take
    2 to 2.5."""

    label_smoothing: float | None = Field(default=None, ge=0, lt=0.5)
    """`cdpo`: the share of pairs that are expected to be the wrong way round; 0.1 where left out."""

    gamma: float | None = Field(default=None, ge=0)
    """`simpo`: the margin by which `beta` times the difference should exceed 0; 0.5 where left out."""

    desirable_weight: float | None = Field(default=None, gt=0)
    """`kto` and `apo_zero_unpaired`: weight of the loss of a desirable answer; 1 where left out."""

    undesirable_weight: float | None = Field(default=None, gt=0)
    """`kto` and `apo_zero_unpaired`: weight of the loss of an undesirable answer; 1 where left out."""

    center_weight: float = Field(default=0.0, ge=0)
    """`reward`: weight of the squared sum of a pair's rewards, which keeps them around 0."""

    sft_weight: float | None = Field(default=None, ge=0)
    """Weight of the cross-entropy of the better answers, a mean over their tokens; 1 for `orpo`, 0 for the others where
    left out."""

    length_normalised: bool | None = None
    """Whether the log-probability of an answer is divided by its tokens; true for `ipo`, `simpo` and `orpo`, false for
    the others where left out."""

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss compares with the model as it was before training."""
        return self.loss in ("dpo", "cdpo", "ipo", *UNPAIRED)

    @property
    def unpaired(self) -> bool:
        """Return whether each answer is marked by itself."""
        return self.loss in UNPAIRED

    @property
    def objective(self) -> dict[str, Any]:
        """The arguments of `options.preference.losses.PairLoss`."""
        return self.model_dump(exclude={"center_weight"}, exclude_none=True)

    @model_validator(mode="after")
    def _fill_in(self) -> PreferenceSection:
        """Set what depends on the loss; refuse what it does not use."""
        for key, loss, usual in (("label_smoothing", "cdpo", 0.1), ("gamma", "simpo", 0.5)):
            if self.loss != loss and getattr(self, key):
                raise ValueError(f"{key}: expected only with loss: {loss}, as {self.loss} does not use it")
            if getattr(self, key) is None:
                setattr(self, key, usual if self.loss == loss else 0.0)
        for key in ("desirable_weight", "undesirable_weight"):
            if not self.unpaired and getattr(self, key) is not None:
                raise ValueError(f"{key}: expected only with loss: kto or apo_zero_unpaired, not with {self.loss}")
            if self.unpaired and getattr(self, key) is None:
                setattr(self, key, 1.0)
        if self.unpaired and (self.sft_weight or self.length_normalised):
            raise ValueError(f"sft_weight and length_normalised: {self.loss} has no use for them; leave them out")
        if self.loss != "reward" and self.center_weight:
            raise ValueError(f"center_weight: expected only with loss: reward, as {self.loss} does not use it")
        if self.loss == "reward" and (self.beta != BETA or self.sft_weight or self.length_normalised):
            raise ValueError(
                "beta, sft_weight and length_normalised: a reward model has no use for them; leave them out"
            )
        if self.sft_weight is None:
            self.sft_weight = float(self.loss == "orpo")
        if self.length_normalised is None:
            self.length_normalised = self.loss in ("ipo", "simpo", "orpo")
        return self


class PreferenceKeys(TrainConfig):
    """A run that may learn from preferences."""

    preference: PreferenceSection | None = None

    @property
    def objective(self) -> Objective:
        if self.preference is None:
            return super().objective
        from options.preference.objective import MarkedAnswers, PairedAnswers

        if self.preference.loss == REWARD:
            raise ConfigError("preference.loss: reward is trained by the option scores, which is not here")
        return (MarkedAnswers if self.preference.unpaired else PairedAnswers)(self, self.preference)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.preference:
            return
        if self.mask == "all":
            yield "mask: a preference is one of answers, so that prompts never count; expected another mask"
        if self.aux_max_z_loss.weight:
            yield "aux_max_z_loss.weight: has no effect on preferences; leave it out"
        if self.from_scratch:
            yield "from_scratch: preferences need a model that answers; expected false, or no preference"
        if (key := self.windows_key) and self.preference.needs_reference:
            yield (
                f"{key}: {self.preference.loss} compares each answer with the model before training, which needs "
                f"all records at once; expected no {key}, or loss: simpo or orpo"
            )
