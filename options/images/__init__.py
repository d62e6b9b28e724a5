"""Train on records with images, through the model's own part that sees (docs/images.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from options.images.keys import KEY, VisionKeys
from training.config.changes import MayChange
from training.option import Option

if TYPE_CHECKING:
    from data.collation import Collation
    from data.sample_set import InMemory, KeptSamples
    from models.spec import ModelSpec
    from training.callbacks import Callback
    from training.job import Task
    from training.objective import ModelAndRecords


def _model(config: VisionKeys, spec: ModelSpec, sets: Sequence[KeptSamples | InMemory]) -> ModelSpec:
    """Return the model with its part that sees, if there is something to see."""
    if any(each.has_images for each in sets):
        from options.images.model import seeing_model

        return seeing_model(config, spec)
    if config.adapts_beside:
        from training.trained import check_names

        check_names(spec)
    if spec.family.sees is None:
        return spec
    from options.images.model import training_tower

    return training_tower(spec, "nothing")


def _collation(config: VisionKeys, task: ModelAndRecords, collation: Collation) -> Collation:
    if task.spec.family.sees is None:
        return collation
    from options.images.model import seeing_collation

    return seeing_collation(config, task, collation)


def _callbacks(config: VisionKeys, task: Task) -> Sequence[Callback]:
    from options.images.telling import TellImages
    from training.language_model import LanguageModel

    return [TellImages(task)] if isinstance(task, LanguageModel) else []


OPTION = Option(
    VisionKeys,
    before="freeze",
    rules={KEY: MayChange(False)},
    callbacks=_callbacks,
    model=_model,
    collation=_collation,
)
