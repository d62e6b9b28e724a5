"""The key `labels` of a config, and `preference.loss: reward`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from options.preference.keys import KEY as PREFERENCE
from options.preference.keys import REWARD, PreferenceKeys
from training.config.keys import TrainConfig

if TYPE_CHECKING:
    from training.objective import Objective

KEY = "labels"


class ScoresKeys(TrainConfig):
    """A run that may train a model which gives a text numbers."""

    labels: list[str] = []
    """Train a classifier with these classes instead of a language model; each record has a `label`, one of these names
    or its number, from 0 (docs/preferences.md#reward-models-and-classes)."""

    @property
    def objective(self) -> Objective:
        from options.scores.objective import Classes, Reward

        if self.labels:
            return Classes(self, self.labels)
        if isinstance(self, PreferenceKeys) and self.preference and self.preference.loss == REWARD:
            return Reward(self, self.preference.center_weight)
        return super().objective

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.labels:
            return
        if len(set(self.labels)) < max(2, len(self.labels)):
            yield f"labels: expected at least two different names, found {', '.join(self.labels)}"
        if PREFERENCE in self.objective_keys:
            yield "labels: a classifier learns from classes, not from preferences; expected labels or preference"
        if self.aux_max_z_loss.weight:
            yield "aux_max_z_loss.weight: has no effect on classes; leave it out"
