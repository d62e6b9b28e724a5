"""`train`: what train_ds.py does, called by a script, which may bring a loss of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from training.callbacks import Callback
from training.config.keys import TrainConfig
from training.distributed.processes import ProcessInfo
from training.distributed.script import run_from_script
from training.errors import ConfigError

if TYPE_CHECKING:
    from models.loss.micro_batch import TokenLoss
    from models.spec import ModelSpec
    from training.distributed.rank_monitor import RankMonitor
    from training.engine.trainer import Trainer
    from training.topology import Division


def train(config: TrainConfig, loss: TokenLoss | None = None, callbacks: Sequence[Callback] = ()) -> None:
    """Train a model of a known family, in a script that is started like train_ds.py.

    Return when all steps are done. A process that cannot continue, or was asked to stop and saved, exits here.

    Args:
        loss: replaces the cross-entropy: takes the trained tokens' logits [T, V] in fp32 and their labels [T], returns
            the loss of each token [T], which must not depend on other tokens. Not recorded in the checkpoint.
        callbacks: called at the hooks of `training.Callback`, after Pipetune's own, on every rank.
    """

    def run(config: TrainConfig, process: ProcessInfo, monitor: RankMonitor) -> bool:
        from training.runs import train_language_model, trainer_kind  # DeepSpeed's, after the device is set

        kind: Any = trainer_kind(config)

        class LossTrainer(kind):
            @classmethod
            def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> Trainer:
                trainer = super().build(config, spec, folder, division)
                module = trainer.engine.module
                module.micro_batch_loss = partial(module.micro_batch_loss, own=token_losses)
                return trainer

        return train_language_model(config, process, monitor, LossTrainer if loss else kind, callbacks)

    def load(process: ProcessInfo | None) -> TrainConfig:
        if loss and config.aux_max_z_loss.weight:
            raise ConfigError("aux_max_z_loss.weight: has no effect with a loss of your own; leave it out")
        if loss and config.objective_keys:
            raise ConfigError(f"{config.objective_keys[0]}: has a loss, and so has this script; expected one of them")
        return config

    def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
        assert loss is not None
        losses = loss(logits, targets)
        if losses.shape != targets.shape:
            raise ConfigError(f"loss: expected one per token, {list(targets.shape)}, found {list(losses.shape)}")
        return losses

    run_from_script(load, run)
