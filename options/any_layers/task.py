"""The task of training a script's layers on its samples (`Pipeline`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset

from data.loader import GlobalBatch, Loader
from options.any_layers.config import PipelineConfig
from options.any_layers.samples import Collate, SampleLoader
from options.any_layers.stage import LayerStage, LayerStageEngine, divide_layers
from training.checkpoint.folder import CheckpointRecord, DataOrder
from training.config.deepspeed_config import check_device
from training.config.gpu import check_gpu
from training.config.keys import TrainConfig
from training.distributed.communication import among_members
from training.distributed.disk import Disk
from training.engine.building import wrap_in_engine
from training.engine.pipeline import PipelineTrainer
from training.engine.trainer import Sent
from training.errors import ConfigError
from training.evaluation import Evaluation
from training.job import Job, Task
from training.topology import Division

if TYPE_CHECKING:
    from options.any_layers.pipeline import Pipeline


class Layers(Task):
    """Layers in a pipeline; see `Pipeline.train` for the arguments."""

    loader: SampleLoader

    def __init__(
        self,
        pipeline: Pipeline,
        dataset: Dataset[Any],
        collate: Collate | None = None,
        eval_dataset: Dataset[Any] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._dataset, self._collate, self._eval_dataset = dataset, collate, eval_dataset
        self.n_layers = len(pipeline.layers)
        self.side_files = {}

    def read(self, config: TrainConfig, disk: Disk, log: Console) -> None:
        assert isinstance(config, PipelineConfig)
        check_gpu(config)
        check_device(config)
        self.loader, self.evaluation = SampleLoader(self._dataset, config, self._collate), None
        if self._eval_dataset is not None:
            held_out = SampleLoader(self._eval_dataset, config, self._collate, evaluates=True)
            self.evaluation = Evaluation({"": held_out}, config, self.loader.steps_per_epoch, active=not log.quiet)
            a_micro_batch = config.micro_batch_size * config.model_topo.replicas
            if left := len(held_out.data.samples) % a_micro_batch:
                log.print(f"evaluation: without the last {left} samples, too few for a micro-batch for each replica")
        elif config.eval_interval or config.eval_at_start:
            raise ConfigError("eval_interval, eval_at_start: without effect, as `train` was given no eval_dataset")
        for name in ("forward_step", "loss"):
            function = getattr(self._pipeline, name)
            if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
                raise ConfigError(f"{name}: has weights, which no layer's file would hold; expected them in the layers")
        self._parts = divide_layers(self._pipeline.layers, config.model_topo.parts, config.model_topo.stages)
        self.order = DataOrder(
            samples=len(self.loader.data.samples),
            fingerprint="",
            seed=config.seed,
            train_batch_size=config.train_batch_size,
            dataloader_drop_last=True,
        )

    def check_checkpoint(self, folder: Path) -> None:
        record = CheckpointRecord.read(folder)
        assert record is not None
        before = sum(record.topology.parts)
        if self.n_layers != before:
            raise ConfigError(f"layers: {self.n_layers}, but {folder} has {before}; expected as many")
        if self.order.samples != record.data.samples:
            raise ConfigError(
                f"dataset: {self.order.samples} samples, but {folder} was trained on {record.data.samples}; expected "
                "as many"
            )

    def divide(self, config: TrainConfig) -> Division:
        return Division(config.topology(self._parts))

    def build(self, job: Job) -> LayerTrainer:
        config, parts = job.config, job.division.topology.parts
        assert isinstance(config, PipelineConfig)
        return LayerTrainer.from_layers(self._pipeline, self.loader, config, parts, job.progress.checkpoint)

    def origin(self, sample: int) -> str:
        return f"sample {sample}"

    def describe_model(self, job: Job) -> list[str]:
        return [f"model: {self.n_layers} layers {job.division.topology.description}"]

    def describe_data(self, job: Job) -> None:
        samples = f"{job.config.train_batch_size} samples, {self.loader.steps_per_epoch} an epoch"
        job.log.print(f"steps: {job.progress.total_steps} of {samples}")


class LayerTrainer(PipelineTrainer):
    """The trainer of a script's layers."""

    engine: LayerStageEngine

    @classmethod
    def from_layers(
        cls,
        pipeline: Pipeline,
        loader: SampleLoader,
        config: PipelineConfig,
        parts: Sequence[int],
        folder: Path | None = None,
    ) -> LayerTrainer:
        """Make this process's layers and the optimizer, and wrap both in DeepSpeed's engine.

        Args:
            loader: its first micro-batch has the shapes of all.
            parts: layers per stage.
            folder: checkpoint to load the weights from.
        """
        with among_members():
            stage = LayerStage(pipeline, config, parts, folder)
        stage.learn_shapes(next(loader.micro_batches(loader.batch(0), 0))[0])
        torch.manual_seed(config.seed + torch.distributed.get_rank())  # dropout differs from rank to rank
        return cls(LayerStageEngine.adopt(wrap_in_engine(stage, config, stage.shared_names)))

    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """Take a step, then copy the first replica's buffers (such as batch statistics) to the others."""
        loss, grid = super().train_step(loader, batch), self.engine.grid
        if len(grid.dp_group) > 1:
            kept = self.engine.module.state_dict(keep_vars=True).values()
            for buffer in [tensor for tensor in kept if not isinstance(tensor, torch.nn.Parameter)]:
                torch.distributed.broadcast(buffer, grid.dp_group[0], grid.get_data_parallel_group())
        return loss

    def micro_batches(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        assert isinstance(loader, SampleLoader)
        self.engine.expect([()] * batch.n_micro_batches)  # all are alike
        return loader.micro_batches(batch, self.replica)
