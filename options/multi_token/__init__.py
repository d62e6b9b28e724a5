"""Train the layers along that predict further ahead, which servers draft with (docs/multi-token-prediction.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from options.multi_token.keys import KEY, DraftKeys
from training.config.changes import NEXT, MayChange
from training.option import Option

if TYPE_CHECKING:
    from training.callbacks import Callback
    from training.job import Task


def callbacks(config: DraftKeys, task: Task) -> Sequence[Callback]:
    """Say of a language model whose layers ahead are not trained along that they are not."""
    from options.multi_token.stale import StaleDrafts  # imports the models' code, which a config does not need
    from training.language_model import LanguageModel

    if config.mtp or not isinstance(task, LanguageModel):
        return []
    return [StaleDrafts(task)]


OPTION = Option(
    DraftKeys,
    before="freeze",
    rules={KEY: MayChange(False), f"{KEY}.weight": MayChange(True, NEXT)},
    objective_key=KEY,
    callbacks=callbacks,
)
