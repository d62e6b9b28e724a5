"""The section `mtp` of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from training.config.keys import TrainConfig
from training.config.section import Section

if TYPE_CHECKING:
    from training.objective import Objective

KEY = "mtp"


class DraftSection(Section):
    """`mtp`: train the layers along that predict further ahead, which servers draft with
    (docs/multi-token-prediction.md)."""

    weight: float = Field(default=0.1, gt=0)
    """What the loss of these layers, a mean over their depths, counts in what is minimised; `loss` in the log stays
    that of the model itself."""

    depth: int | None = Field(default=None, ge=1)
    """How many of these layers are trained, the first ones; all that the model has where left out, one with `init`."""

    detach: bool = True
    """Whether these layers alone learn from their loss. With `false` embedding, blocks and head do too, as in
    pretraining."""

    only: bool = False
    """Train these layers and nothing else, on a model that is finished."""

    init: Literal["copy"] | None = None
    """`copy`: begin with new layers, each a copy of the last block, for a model that has none."""


class DraftKeys(TrainConfig):
    """A run that may train layers that predict further ahead."""

    mtp: DraftSection | None = None

    @property
    def objective(self) -> Objective:
        if self.mtp is None:
            return super().objective
        from options.multi_token.objective import MultiToken

        return MultiToken(self, self.mtp)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.mtp:
            return
        for key in self.objective_keys:
            if key != KEY:
                yield f"mtp: learns what records say, and {key} has a loss of its own; expected one of them"
        if self.lora and self.mtp.init:
            yield "mtp.init: an adapter belongs to layers that its base has; expected no init, or no lora"
        if self.lora and self.mtp.only:
            yield "mtp.only: trains these layers in full; expected no lora"
        if self.mtp.only and self.freeze:
            yield "mtp.only: trains these layers alone; expected no freeze"
        if self.mtp.only and not self.mtp.detach:
            yield "mtp.only: nothing else learns, so detach: false has no effect; leave it out"
