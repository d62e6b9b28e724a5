"""What the training loop asks of an engine, whichever way the model is spread.

`training.pipeline_trainer` is the pipeline, `training.zero_trainer` is ZeRO. Both see the same global batches and give
the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from deepspeed.runtime.engine import DeepSpeedEngine

from data.loader import GlobalBatch, Loader


class Trainer(Protocol):
    """One rank's share of the model in a DeepSpeed engine. All ranks call each method, with the same global batch.

    Attributes:
        engine: saves and loads checkpoints, and knows step, learning rate and gradient norm.
    """

    engine: DeepSpeedEngine

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """One optimizer step; the loss, a mean over the supervised tokens of the global batch, the same on all ranks."""
        ...

    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """The cross-entropy over the supervised tokens of a global batch; no gradient, no dropout, no further terms."""
        ...

    def write_layers(self, folder: Path) -> None:
        """Write the layer files of the pipeline layout that DeepSpeed does not write by itself."""
        ...
