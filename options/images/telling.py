"""Say in the log how many images a run sees, and what of the part that sees them is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.quantities import counted
from options.images.keys import KEY, VisionKeys
from training.callbacks import Callback

if TYPE_CHECKING:
    from training.loop import Run
    from training.objective import ModelAndRecords

TRAINED = {"nothing": "which stays as it is", "projector": "whose projector is trained", "all": "which is trained"}
ADAPTED = TRAINED | {"projector": "whose projector has adapters", "all": "which has adapters"}


class TellImages(Callback):
    """Count the samples with images; settings for them that have no effect would be ignored without a word."""

    def __init__(self, model: ModelAndRecords) -> None:
        self._model = model

    def on_start(self, run: Run) -> None:
        config, log = run.config, run.progress.log
        assert isinstance(config, VisionKeys)
        sets = filter(None, (self._model.dataset, self._model.held_out))
        seen = next((each for each in sets if each.has_images), None)
        if seen is None:
            if KEY in config.model_fields_set:
                log.print(f"images: none in the records; {KEY} has no effect")
            return
        tokens = seen.image_tokens
        seeing = int((tokens > 0).sum())
        share = f"in {counted(seeing, 'sample')} of {len(tokens):,}"
        trained = (ADAPTED if config.lora else TRAINED)[config.vision.train]
        log.print(f"images: {share}, {int(tokens.sum()):,} tokens, seen by the model's own tower, {trained}")
        if config.from_scratch and config.vision.train != "all":
            what = f"{KEY}.train: {config.vision.train} leaves a tower of random weights"
            log.print(f"warning: from_scratch: {what}; expected {KEY}.train: all, or a model that has learnt to see")
