"""Pass long rows through the stages in chunks (docs/long-rows.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from options.row_chunks.keys import KEY, ChunkKeys
from training.config.changes import ROUNDING, MayChange
from training.option import Option

if TYPE_CHECKING:
    from training.callbacks import Callback
    from training.engine.trainer import Trainer
    from training.job import Task


def _trainer(config: ChunkKeys, in_stages: bool) -> type[Trainer] | None:
    if not config.row_chunk:
        return None
    from options.row_chunks import trainer

    return trainer.ChunkPipelineTrainer if in_stages else trainer.ChunkZeroTrainer


def _callbacks(config: ChunkKeys, task: Task) -> Sequence[Callback]:
    from training.language_model import LanguageModel

    if not config.row_chunk or not isinstance(task, LanguageModel):
        return []
    from options.row_chunks.telling import TellChunks

    return [TellChunks(task)]


RULE = MayChange(True, f"{ROUNDING}, and dropout draws other numbers", kept=True)
OPTION = Option(ChunkKeys, before="packing", rules={KEY: RULE}, callbacks=_callbacks, trainer=_trainer)
