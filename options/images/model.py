"""Give a run's model its eyes, and its micro-batches their pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from data.images.ahead import PictureSettings
from data.images.collation import SeeingCollation
from models.images import frozen, seeing
from models.images.seeing import Train

if TYPE_CHECKING:
    from data.collation import Collation
    from models.spec import ModelSpec
    from options.images.keys import VisionKeys
    from training.language_model import LanguageModel


def seeing_model(config: VisionKeys, spec: ModelSpec) -> ModelSpec:
    """Return the model with its tower, of which that is trained which the config says.

    Raises:
        CheckpointError: it has none that holds.
        ConfigError: the run is of a kind that takes no images.
    """
    found = seeing(spec)
    config.check_model(found)
    return training_tower(found, config.vision.train)


def training_tower(spec: ModelSpec, train: Train) -> ModelSpec:
    """Return a model with its tower, trained as far as is said."""
    if spec.trained.lora:  # which trains no weight of the model's own
        return spec
    return spec.training(replace(spec.trained, freeze=(*spec.trained.freeze, *frozen(spec, train))))


def seeing_collation(config: VisionKeys, task: LanguageModel, collation: Collation) -> Collation:
    """Return what a loader has to know of samples with images, beside what the objective says."""
    sees = task.spec.family.sees
    assert sees is not None
    settings = PictureSettings(task.model_folder, *config.pixels)
    axes = sees.axes_of if sees.axes else None
    both_ways = sees.image_token if sees.both_ways else None
    return SeeingCollation(collation, settings, sees.inputs, axes, both_ways)
