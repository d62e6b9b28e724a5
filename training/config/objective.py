"""Sections of a config for what is learnt: adapters, preferences, distillation, further losses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from training.config.section import PathText, Section, expected


class LoraSection(Section):
    """`lora`: train low-rank adapters instead of the weights, with peft's meanings."""

    r: int = Field(default=8, ge=1)
    """The rank of the adapters; wherever `lora` is given they are trained instead of the weights (docs/adapters.md)."""

    alpha: float = Field(default=8, gt=0)
    """The adapters count `alpha / r`, or `alpha / sqrt(r)` with `rslora`."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of what enters the adapters; 0 where experts have them."""

    rslora: bool = False
    """Scale by the square root of `r` (arXiv:2312.03732)."""

    lr_ratio: float = Field(default=1.0, gt=0)
    """Factor of the learning rate of B (LoRA+, arXiv:2402.12354, which takes 16)."""

    targets: Annotated[
        str | list[str], Field(min_length=1), expected("all-linear, a list of names, or a regular expression")
    ] = "all-linear"
    """Which modules get an adapter: all linear layers but the head (`all-linear`); those whose names end with one of a
    list, such as `[q_proj, v_proj]`; or those whose whole names match a regular expression. Weights of experts are
    named as modules are: `experts.down_proj`."""

    experts: bool = True
    """Whether weights of experts get adapters too, where `targets` includes them."""

    modules_to_save: list[str] = []
    """Modules that are trained in full and saved with the adapter, such as `[embed_tokens, lm_head]`."""

    base: Literal["nf4", "fp8"] | None = None
    """`nf4`: hold the weights of the blocks under the adapters in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes
    (`pip install bitsandbytes`); embedding, norms, routers and head stay in 16 bits. `fp8`: hold the weights that
    `model_path` stores in fp8 as they are, in 8 bits. Without the key all are held in 16 bits."""

    start_from: PathText | None = None
    """Start from this adapter instead of a fresh one: a folder of peft's, or the folder of a run."""


BETA = 0.1
UNPAIRED = ("kto", "apo_zero_unpaired")


class PreferenceSection(Section):
    """`preference`: learn from pairs of answers, or from good and bad ones (docs/preferences.md)."""

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


class ZLoss(Section):
    """`aux_max_z_loss`: adds weight * mean of (max log-softmax)^2, which keeps logits from drifting."""

    weight: float = Field(default=0.0, ge=0)
    """Adds weight x mean of (max log-softmax)² to the loss, which keeps logits from drifting."""


class RouterLoss(Section):
    """`aux_router_loss`: the load-balancing loss of mixture-of-experts models."""

    weight: float | None = Field(default=None, ge=0)
    """Mixture of experts only: the weight of the router loss (docs/models.md#the-router-loss). Without the key it is
    `router_aux_loss_coef` where config.json says `output_router_logits`, else there is none; `0.0` turns it off in any
    case."""
