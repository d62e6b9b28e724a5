"""Give a run's model its eyes, and its micro-batches their pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from data.images.ahead import PictureSettings
from data.images.collation import SeeingCollation
from models.family import EYES
from models.images import frozen, reached, seeing
from models.images.seeing import Train
from training.errors import ConfigError
from training.trained import check_names

if TYPE_CHECKING:
    from data.collation import Collation
    from models.spec import ModelSpec
    from options.images.keys import VisionKeys
    from training.objective import ModelAndRecords


def seeing_model(config: VisionKeys, spec: ModelSpec) -> ModelSpec:
    """Return the model with its tower, of which that is trained which the config says.

    Raises:
        CheckpointError: it has none that holds.
        ConfigError: the run is of a kind that takes no images.
    """
    found = seeing(spec)
    config.check_model(found)
    found = config.train_beside(found)
    if found.trained.lora:
        check_names(found)
        if config.adapts_beside and not any(name.startswith(f"{EYES}.") for name in found.trained_names(0)):
            what = f"vision.train: {config.vision.train}: lora.targets names no linear layer there"
            raise ConfigError(f"{what} of {found.family.name}; expected other targets, or vision.train: nothing")
    return found


def training_tower(spec: ModelSpec, train: Train) -> ModelSpec:
    """Return a model with its tower, trained or adapted as far as is said."""
    if lora := spec.trained.lora:
        return spec.training(replace(spec.trained, lora=replace(lora, beside=reached(spec, train))))
    return spec.training(replace(spec.trained, freeze=(*spec.trained.freeze, *frozen(spec, train))))


def seeing_collation(config: VisionKeys, task: ModelAndRecords, collation: Collation) -> Collation:
    """Return what a loader has to know of samples with images, beside what the objective says."""
    sees = task.spec.family.sees
    assert sees is not None
    settings = PictureSettings(task.model_folder, *config.pixels)
    mark = sees.marks_of if sees.axes or sees.both_ways else None

    def distrust() -> None:
        for data in filter(None, (task.dataset, task.held_out)):
            data.distrust()

    return SeeingCollation(collation, settings, sees.inputs, mark, distrust)
