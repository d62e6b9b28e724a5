"""What a run may have besides: a folder for each option. The core imports none of them.

`objective_of` chooses what is trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.config.keys import TrainConfig
    from training.objective import Objective


def objective_of(config: TrainConfig) -> Objective:
    """Return what a config trains, by the key that asks for it (`training.objective`)."""
    from options.distillation.objective import Distillation
    from options.preference.objective import MarkedAnswers, PairedAnswers
    from options.scores.objective import Classes, Reward
    from training.fine_tuning import FineTuning

    if config.labels:
        return Classes(config)
    if config.distillation:
        return Distillation(config)
    if config.preference is None:
        return FineTuning(config)
    if config.preference.loss == "reward":
        return Reward(config)
    return (MarkedAnswers if config.preference.unpaired else PairedAnswers)(config)
