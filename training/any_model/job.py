"""The whole job of one rank of a `Pipeline`: what `training.job` is for the families of language models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch.utils.data import Dataset

from common.log import Log
from common.whole_files import replace_text
from models.checkpoint.publish import writing
from training.any_model.config import PipelineConfig
from training.any_model.layers import Layer, Loss, count_weights, divide
from training.any_model.samples import Collate, SampleLoader
from training.any_model.trainer import LayerTrainer
from training.bad_steps import BadSteps
from training.checkpoint.folder import CheckpointRecord, DataOrder, step_folder
from training.checkpoint.resume import check_resumable, find_checkpoint, take_up
from training.checkpoint.saving import Checkpointer
from training.config.changes import settings_of
from training.config.deepspeed_config import check_device
from training.config.gpu import check_gpu
from training.distributed.processes import Place, agreed
from training.distributed.rank_monitor import RankMonitor
from training.distributed.signals import StopRequest
from training.engine.numerics import describe_numerics
from training.errors import ConfigError
from training.finish import finish
from training.loop import Run, train
from training.metrics.reporter import Reporter
from training.metrics.run_info import write_run_info
from training.metrics.tracking import open_trackers
from training.optimizer.lr_schedules import LearningRate
from training.preflight import check_setup, check_shared
from training.profiler.session import Timeline
from training.topology import Topology


def run_layers(
    layers: Sequence[Layer],
    loss: Loss,
    dataset: Dataset[Any],
    collate: Collate | None,
    config: PipelineConfig,
    place: Place,
    monitor: RankMonitor,
) -> None:
    """Train, from the beginning or from the newest checkpoint; see `Pipeline.train`."""
    reporting = place.rank == 0
    log = Log(quiet=not reporting, highlight=False)
    stop, save_path, topo = StopRequest(), Path(config.save_path), config.model_topo
    check_setup(config, log)
    with agreed():
        check_gpu(config)
        check_device(config)
        loader = SampleLoader(dataset, config, collate)
        parts = divide(layers, topo.parts, topo.stages)
        monitor.hold(save_path)
    check_shared(save_path)
    topology = Topology(
        stages=topo.stages, replicas=topo.replicas, zero_stage=config.zero_optimization.stage, parts=parts
    )
    order = DataOrder(
        samples=len(loader.data.samples),
        fingerprint="",
        seed=config.seed,
        train_batch_size=config.train_batch_size,
        dataloader_drop_last=True,
    )
    total_steps = config.max_steps or config.n_epoches * loader.steps_per_epoch
    checkpoint = find_checkpoint(config, save_path, log)
    known = CheckpointRecord.read(checkpoint) if checkpoint else None
    done = known.step if known else 0
    with agreed():
        changes = check_same(checkpoint, known, order, topology, config) if checkpoint and known else []
    for line in [f"model: {len(layers)} layers {topology.description}", *describe_numerics(config), *changes]:
        log.print(line)
    log.print(f"steps: {total_steps} of {config.train_batch_size} samples, {loader.steps_per_epoch} an epoch")
    if done >= total_steps:
        log.print(f"nothing to train: {checkpoint} has {done} steps done")
        return
    with agreed(), writing(save_path):
        if reporting:
            replace_text(save_path / "config.yml", yaml.safe_dump(config.dump(), sort_keys=False))
    trainer = LayerTrainer.of(layers, loss, loader, config, parts, checkpoint)
    if checkpoint and known:
        take_up(trainer, checkpoint, known, config, changed=known.topology != topology)
        log.print(f"resumed: {checkpoint}, after step {done}")
    record = CheckpointRecord(step=done, topology=topology, data=order, settings=settings_of(config))
    timeline = None
    if steps := config.profile_steps:
        costs = count_weights(layers)
        timeline = Timeline(steps, trainer, lambda *_: costs, parts, save_path, log)
    with agreed(), writing(save_path):
        trackers = open_trackers(config, save_path, done + 1) if reporting else []
        if reporting:
            write_run_info(save_path, config, parts, done + 1)
        reporter = Reporter(save_path, total_steps, reporting, config.steps_per_print, done + 1, trackers)
    with reporter:
        last = train(
            Run(
                trainer=trainer,
                loader=loader,
                checkpointer=Checkpointer(trainer, config, save_path, {}, record, log),
                reporter=reporter,
                stop=stop,
                monitor=monitor,
                bad_steps=BadSteps(trainer, config.max_bad_steps, "sample {}".format, log, reporting),
                evaluation=None,
                utilization=lambda *_: None,
                learning_rate=LearningRate(trainer.engine.basic_optimizer, config.scheduler, total_steps),
                done=done,
                evaluate_first=False,
                total_steps=total_steps,
                stages=topo.stages,
                timeline=timeline,
            )
        )
    if timeline:
        timeline.finish()
    saved = step_folder(save_path, last)
    if last < total_steps:
        log.print(f"stopped after step {last} of {total_steps}; the same command goes on from there: {saved}")
        sys.exit(stop.exit_code)
    finish(config, [], saved, saved, log)


def check_same(
    folder: Path, record: CheckpointRecord, order: DataOrder, topology: Topology, config: PipelineConfig
) -> list[str]:
    """What changed since a checkpoint was saved, in lines.

    Raises:
        ConfigError: it is that of another model, of other data or of another kind of update.
    """
    layers, samples = sum(record.topology.parts), record.data.samples
    if layers != sum(topology.parts):
        raise ConfigError(f"layers: {sum(topology.parts)}, but {folder} has {layers}; expected as many")
    if samples != order.samples:
        raise ConfigError(f"dataset: {order.samples} samples, but {folder} was trained on {samples}; expected as many")
    changes = check_resumable(folder, record, order, config)
    if record.topology != topology:
        changes.append(f"{folder.name} was saved {record.topology.full_description}; its states are divided anew")
    return changes
