"""`train`: what train_ds.py does, called by a script, which may bring a loss of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from training.callbacks import Callback
from training.config.keys import TrainConfig
from training.distributed.processes import Place
from training.distributed.script import run_from_script
from training.errors import ConfigError

if TYPE_CHECKING:
    from models.loss import TokenLoss
    from models.spec import ModelSpec
    from training.distributed.rank_monitor import RankMonitor
    from training.topology import Division


def train(config: TrainConfig, loss: TokenLoss | None = None, callbacks: Sequence[Callback] = ()) -> None:
    """Train a model of a known family, and return when all steps are done; the script is started as train_ds.py is.

    A process that cannot continue, or was asked to stop and saved, exits here.

    Args:
        loss: in place of the cross-entropy, takes the logits [T, V] in fp32 of tokens that bear loss and what each
            should have been, [T], and gives the loss of each, [T]; a token's must not depend on the others'. It is not
            recorded: a run that goes on takes the one that it is given then.
        callbacks: called at the hooks of `training.Callback`, after Pipetune's own, on every rank.
    """

    def run(config: TrainConfig, place: Place, monitor: RankMonitor) -> bool:
        from training.engine.pipeline import PipelineTrainer  # DeepSpeed has to be told of the device first
        from training.options import train_language_model

        class LossTrainer(PipelineTrainer):
            @classmethod
            def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> PipelineTrainer:
                trainer = super().build(config, spec, folder, division)
                module = trainer.engine.module
                module.micro_batch_loss = partial(module.micro_batch_loss, own=of_each_token)
                return trainer

        return train_language_model(config, place, monitor, LossTrainer if loss else PipelineTrainer, callbacks)

    def load(place: Place | None) -> TrainConfig:
        if loss and config.aux_max_z_loss.weight:
            raise ConfigError("aux_max_z_loss.weight: of the cross-entropy, whose place a loss of your own takes")
        return config

    def of_each_token(logits: Tensor, targets: Tensor) -> Tensor:
        assert loss is not None
        losses = loss(logits, targets)
        if losses.shape != targets.shape:
            expected = f"expected a number for each token, {list(targets.shape)}"
            raise ConfigError(f"loss: {expected}, found {list(losses.shape)}")
        return losses

    run_from_script(load, run)
