"""Sections of a config for what is learnt: adapters, further losses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from training.config.section import PathText, Section, expected


class LoraSection(Section):
    """`lora`: train low-rank adapters instead of the weights, with peft's meanings."""

    short_for: ClassVar[str | None] = "targets"

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

    @field_validator("targets", mode="before")
    @classmethod
    def _all(cls, targets: Any) -> Any:
        return "all-linear" if targets in ("all", ["all"], ["all-linear"]) else targets  # LLaMA-Factory's, ms-swift's


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
