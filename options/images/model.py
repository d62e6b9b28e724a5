"""Give a run's model its eyes, and its micro-batches their pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from data.images.ahead import PictureSettings
from data.images.collation import SeeingCollation
from models.checkpoint.layout import layer_file
from models.family import EYES
from models.images import frozen, reached, seeing
from models.images.layer_files import eyes_in_layers
from training.errors import ConfigError
from training.trained import check_names

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
    folder = Path(config.model_path)
    if (folder / layer_file(0)).is_file() and not eyes_in_layers(folder):
        what = "hg_to_pp has the tower beside the layers, and the records have images"
        raise ConfigError(f"model_path: {folder}: {what}; expected the HuggingFace folder that it was made from")
    found = seeing(spec)
    config.check_model(found)
    if lora := found.trained.lora:
        found = found.training(replace(found.trained, lora=replace(lora, beside=reached(found, config.vision.train))))
        check_names(found)
        if config.adapts_beside and not any(name.startswith(f"{EYES}.") for name in found.trained_names(0)):
            what = f"vision.train: {config.vision.train}: lora.targets names no linear layer there"
            raise ConfigError(f"{what} of {found.family.name}; expected other targets, or vision.train: nothing")
        return found
    patterns = frozen(found, config.vision.train)
    return found.training(replace(found.trained, freeze=(*found.trained.freeze, *patterns)))


def seeing_collation(config: VisionKeys, task: LanguageModel, collation: Collation) -> Collation:
    """Return what a loader has to know of samples with images, beside what the objective says."""
    sees = task.spec.family.sees
    assert sees is not None
    settings = PictureSettings(task.model_folder, *config.pixels)
    mark = sees.marks_of if sees.axes or sees.both_ways else None

    def distrust() -> None:
        for data in filter(None, (task.dataset, task.held_out)):
            data.samples.distrust()

    return SeeingCollation(collation, settings, sees.inputs, mark, distrust)
