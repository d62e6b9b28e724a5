"""What the training loop asks of an engine, whichever way the model is spread.

`training.engine.pipeline` is the pipeline, `training.engine.zero` is ZeRO. Both see the same global batches and give
the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from deepspeed.runtime.engine import DeepSpeedEngine

from data.loader import GlobalBatch, Loader
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.engine.timings import Timings
from training.plan.workload import Workload
from training.topology import Topology


class Trainer(Protocol):
    """One rank's share of the model in a DeepSpeed engine. All ranks call each method, with the same global batch.

    Attributes:
        engine: saves and loads checkpoints, and knows step, learning rate and gradient norm.
        stage: of the pipeline, from 0.
        timings: where the time of a step goes.
    """

    engine: DeepSpeedEngine
    stage: int
    timings: Timings

    @classmethod
    def check(cls, config: TrainConfig, spec: ModelSpec) -> None:
        """Refuse a config that does not fit the model, without communication.

        Raises:
            ConfigError: they do not fit each other.
        """
        ...

    @classmethod
    def topology(cls, config: TrainConfig, spec: ModelSpec, workload: Workload | None = None) -> Topology:
        """How a model is divided under a checked config.

        Args:
            workload: what the data are like, for `parts: auto`; assumed where absent.
        """
        ...

    @classmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, total_steps: int) -> Trainer:
        """Load this rank's weights from `folder` and make the engine.

        Raises:
            RunRefused: on every rank, when some rank's weights or settings are unusable.
        """
        ...

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """One optimizer step; the loss, a mean over the global batch's supervised tokens, the same on all ranks."""
        ...

    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """The cross-entropy over the supervised tokens of a global batch; no gradient, no dropout, no further terms."""
        ...

    def write_layers(self, folder: Path, save: Callable[[Any, str], object]) -> None:
        """Write the layer files of the pipeline layout that DeepSpeed does not write by itself.

        Args:
            save: writes a state dict to a path; it does not raise, as the ranks work together.
        """
        ...
