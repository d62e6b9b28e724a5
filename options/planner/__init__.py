"""Predict time and memory of a run before it begins, and choose what is `auto` (docs/parallelism.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from options.planner.flags import FLAGS
from options.planner.keys import PlannerKeys
from training.config.changes import FREE
from training.option import Option

if TYPE_CHECKING:
    from training.callbacks import Callback
    from training.job import Task


def _first_callbacks(config: PlannerKeys, task: Task) -> Sequence[Callback]:
    from options.planner.planning import Planning
    from options.planner.utilization import Mfu
    from training.language_model import LanguageModel

    return [Planning(task), Mfu(task)] if isinstance(task, LanguageModel) else []


def _callbacks(config: PlannerKeys, task: Task) -> Sequence[Callback]:
    from options.planner.feedback import Feedback
    from training.language_model import LanguageModel

    if not isinstance(task, LanguageModel) or not task.in_stages or config.weights_on_host:
        return []
    return [Feedback(task, config.rebalance)]


OPTION = Option(
    PlannerKeys,
    before="schedule",
    rules={"rebalance": FREE},
    callbacks=_callbacks,
    first_callbacks=_first_callbacks,
    flags=FLAGS,
)
