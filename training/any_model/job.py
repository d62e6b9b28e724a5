"""The whole job of one rank of a `Pipeline`: what `training.job` is for the families of language models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from common.log import Log
from training.any_model.config import PipelineConfig
from training.any_model.layers import ForwardStep, Layer, Loss, check_functions, divide
from training.any_model.samples import Collate, SampleLoader
from training.any_model.trainer import LayerTrainer
from training.checkpoint.folder import CheckpointRecord, DataOrder
from training.checkpoint.resume import resume
from training.config.deepspeed_config import check_device
from training.config.gpu import check_gpu
from training.config.passed_on import unheeded
from training.distributed.disk import Disk
from training.distributed.processes import Place, agreed
from training.distributed.rank_monitor import RankMonitor
from training.distributed.signals import StopRequest
from training.engine.numerics import describe_numerics
from training.errors import ConfigError
from training.evaluation import Evaluation
from training.loop import Run, train
from training.plan.auto import topology_of
from training.preflight import check_folder, check_setup
from training.progress import Progress


def run_layers(
    layers: Sequence[Layer],
    forward_step: ForwardStep,
    loss: Loss,
    dataset: Dataset[Any],
    collate: Collate | None,
    eval_dataset: Dataset[Any] | None,
    config: PipelineConfig,
    place: Place,
    monitor: RankMonitor,
) -> None:
    """Train, from the beginning or from the newest checkpoint; see `Pipeline.train`."""
    log, topo = Log(quiet=place.rank > 0, highlight=False), config.model_topo
    stop = StopRequest(config.preemption_signals)
    check_setup(config, log)
    with agreed():
        check_gpu(config)
        check_device(config)
        loader, evaluation = SampleLoader(dataset, config, collate), None
        if eval_dataset is not None:
            held_out = SampleLoader(eval_dataset, config, collate, evaluates=True)
            evaluation = Evaluation({"": held_out}, config, loader.steps_per_epoch, active=not log.quiet)
            if left := len(held_out.data.samples) % (config.train_micro_batch_size_per_gpu * topo.replicas):
                log.print(f"evaluation: without the last {left} samples, which fill no micro-batch for each replica")
        elif config.eval_interval or config.eval_at_start:
            raise ConfigError("eval_interval, eval_at_start: without effect, as `train` was given no eval_dataset")
        check_functions(forward_step=forward_step, loss=loss)
        parts = divide(layers, topo.parts, topo.stages)
    disk = Disk.of(config.storage, place, config.model_topo)
    check_folder(Path(config.save_path), disk, log)
    with agreed():
        monitor.hold(Path(config.save_path), disk)
    topology = topology_of(config, parts)
    order = DataOrder(
        samples=len(loader.data.samples),
        fingerprint="",
        seed=config.seed,
        train_batch_size=config.train_batch_size,
        dataloader_drop_last=True,
    )
    progress = Progress.find(
        config, disk, log, order, loader.steps_per_epoch, evaluation, partial(check_same, len(layers), order.samples)
    )
    if progress.is_over([], Path()):
        return
    for line in [f"model: {len(layers)} layers {topology.description}", *describe_numerics(config), *unheeded(config)]:
        log.print(line)
    log.print(f"steps: {progress.total_steps} of {config.train_batch_size} samples, {loader.steps_per_epoch} an epoch")
    build = partial(LayerTrainer.of, layers, forward_step, loss, loader, config, parts, progress.checkpoint)
    run = Run(
        config=config,
        progress=progress,
        topology=topology,
        trainer=resume(progress.checkpoint, progress.known, topology, config, build, log),
        disk=disk,
        loader=loader,
        monitor=monitor,
        stop=stop,
        origin="sample {}".format,
        evaluation=evaluation,
    )
    progress.end(train(run), stop, [], Path())


def check_same(layers: int, samples: int, folder: Path) -> None:
    """Raise a ConfigError where a checkpoint is that of another model or of other data."""
    record = CheckpointRecord.read(folder)
    assert record is not None
    before = sum(record.topology.parts)
    if layers != before:
        raise ConfigError(f"layers: {layers}, but {folder} has {before}; expected as many")
    if samples != record.data.samples:
        raise ConfigError(
            f"dataset: {samples} samples, but {folder} was trained on {record.data.samples}; expected as many"
        )
