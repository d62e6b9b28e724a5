"""Pass long rows through the stages in chunks (docs/long-rows.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from options.row_chunks.keys import KEY, ChunkKeys
from training.config.changes import ROUNDING, MayChange
from training.option import Option

if TYPE_CHECKING:
    from training.engine.trainer import Trainer


def _trainer(config: ChunkKeys, in_stages: bool) -> type[Trainer] | None:
    if not config.row_chunk:
        return None
    from options.row_chunks import trainer

    return trainer.ChunkPipelineTrainer if in_stages else trainer.ChunkZeroTrainer


RULE = MayChange(True, f"{ROUNDING}, and dropout draws other numbers", kept=True)
OPTION = Option(ChunkKeys, before="packing", rules={KEY: RULE}, trainer=_trainer)
