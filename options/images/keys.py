"""The section `vision` of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from data.settings import Pixels
from training.config.keys import TrainConfig
from training.config.section import Section
from training.errors import ConfigError

if TYPE_CHECKING:
    from models.spec import ModelSpec

KEY = "vision"


class VisionSection(Section):
    """`vision`: how the images in the records are seen (docs/images.md); records without any need none of it."""

    train: Literal["nothing", "projector", "all"] = "nothing"
    """What is trained of the part that sees: nothing of it, so that it keeps no activations and no optimizer state; the
    layers that turn its features into the language model's width (`projector`); or all of it. With `lora` it is what of
    it gets adapters, where `lora.targets` names it."""

    max_pixels: int | None = Field(default=None, ge=1)
    """Shrink images to at most so many pixels, each with its sides' ratio, where the model takes images of any size: an
    image of Qwen2.5-VL takes one token for 28 x 28 pixels. Without the key as the model's own processor does."""

    min_pixels: int | None = Field(default=None, ge=1)
    """Enlarge smaller images to so many pixels; as `max_pixels`."""


class VisionKeys(TrainConfig):
    """A run whose records may have images."""

    vision: VisionSection = VisionSection()

    @property
    def pixels(self) -> Pixels:
        return Pixels(self.vision.min_pixels, self.vision.max_pixels)

    @property
    def adapts_beside(self) -> bool:
        return self.lora is not None and self.vision.train != "nothing"

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        least, most = self.pixels
        if least and most and least > most:
            yield f"{KEY}: min_pixels: {least} is above max_pixels: {most}; expected it below"

    def check_model(self, spec: ModelSpec) -> None:
        super().check_model(spec)
        if spec.family.sees is None:
            return
        self._check_first_stage(spec)
        if self.weights_on_host:
            raise ConfigError(f"schedule: {self.schedule}: not with images in the records; expected another schedule")
        if self.model_topo.sequence > 1:
            raise ConfigError(
                "model_topo.sequence: not with images in the records, as they lie in whole rows; expected 1"
            )
        if not self.objective.sees:
            keys = " and ".join(self.objective_keys)
            raise ConfigError(f"{keys}: not with images in the records; expected records of text alone")

    def train_beside(self, spec: ModelSpec) -> ModelSpec:
        spec = super().train_beside(spec)
        if spec.family.sees is None:
            return spec
        from options.images.model import training_tower  # which needs torch

        return training_tower(spec, self.vision.train)

    def _check_first_stage(self, spec: ModelSpec) -> None:
        """Refuse parts that have the blocks elsewhere behind which a tower adds features, too."""
        least, parts = spec.first_layers, self.model_topo.parts
        if self.chunks > 1 and parts and parts[0] < least:
            reason = f"{spec.family.name} adds features of images behind its first {least - 1} blocks"
            raise ConfigError(f"model_topo.parts: {parts}: {reason}; expected at least {least} in the first stage")
        if self.chunks > spec.n_layers - least + 1:
            reason = f"{spec.family.name} needs its first {least} layers in one stage"
            raise ConfigError(f"model_topo.process_topology.dims: {self.model_topo.stages} stages: {reason}")
