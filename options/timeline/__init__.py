"""Record what every rank did, and when it waited (docs/memory-and-speed.md#see-where-the-time-goes)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from annotated_types import Predicate
from pydantic import PositiveInt

from training.config.changes import FREE
from training.config.keys import TrainConfig
from training.config.section import expected
from training.option import Option

if TYPE_CHECKING:
    from training.callbacks import Callback
    from training.job import Task


class TimelineKeys(TrainConfig):
    """A run of which a timeline may be drawn."""

    profile_steps: Annotated[
        tuple[PositiveInt, PositiveInt] | None,
        Predicate(lambda steps: not steps or steps[0] <= steps[1]),
        expected("[first, last], two steps from 1"),
    ] = None
    """`[a, b]`: draw a timeline of steps a to b, counted from 1 (docs/memory-and-speed.md#see-where-the-time-goes)."""


def _callbacks(config: TimelineKeys, _: Task) -> Sequence[Callback]:
    if config.profile_steps is None:
        return []
    from options.timeline.session import ProfiledSteps

    return [ProfiledSteps(config.profile_steps)]


OPTION = Option(TimelineKeys, before="steps_per_print", rules={"profile_steps": FREE}, callbacks=_callbacks)
