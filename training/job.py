"""The whole job of one rank, the same for both training doors: model, data, engine, resume, loop, export."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import yaml
from rich.console import Console

from data.dataset import Dataset
from data.loader import Loader
from data.streaming.stream import Stream
from models.attention import choose_attention
from models.checkpoint.layout import resolve
from models.lean_loss import chunk_tokens
from models.spec import ModelSpec
from training.bad_steps import BadSteps
from training.checkpoint.exporting import export_run
from training.checkpoint.folder import RECORD, Best, CheckpointRecord, DataOrder, step_folder
from training.checkpoint.resume import check_resumable, find_checkpoint, fixed_settings, resume
from training.checkpoint.saving import Checkpointer
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.data_setup import RecordReader, build_loader, packing_told, report, start_stream
from training.distributed.processes import Place, agreed
from training.distributed.rank_monitor import RankMonitor
from training.distributed.signals import StopRequest
from training.engine.trainer import Trainer
from training.errors import ConfigError
from training.evaluation import Evaluation
from training.log import Log
from training.loop import Run, train
from training.metrics.flops import Utilization
from training.metrics.reporter import Reporter
from training.metrics.run_info import write_run_info
from training.metrics.tracking import open_trackers
from training.plan.auto import divide
from training.profiler.session import Timeline
from training.topology import Division


@dataclass
class Inputs:
    """What a run is made of, read and checked before anything is built.

    Attributes:
        folder: the resolved `model_path`.
        dataset: the records to train on; a stream of them is not started yet.
        evaluation_set: the records to evaluate on, if any.
        save_path: the run's folder.
    """

    folder: Path
    spec: ModelSpec
    dataset: Dataset | Stream
    loader: Loader
    evaluation_set: Dataset | None
    save_path: Path

    @classmethod
    def read(cls, config: TrainConfig, log: Console, monitor: RankMonitor) -> Inputs:
        """Read model config and records, make the run's folder and take its lease."""
        folder = resolve(config.model_path)
        spec = ModelSpec.from_folder(folder)
        config.parts_for(spec.n_layers)  # checked before the data are read, which takes longer
        reader = RecordReader(config, folder, log)
        dataset = reader.stream() if config.stream_gb else reader.read("data", config.data_path)
        loader = build_loader(dataset, config, config.model_topo.replicas, config.dataloader_drop_last)
        evaluation_set = reader.read("evaluation data", config.eval_data_path) if config.eval_data_path else None
        reader.check_vocabulary(int(spec.config.vocab_size), dataset, *([evaluation_set] if evaluation_set else []))
        save_path = make_run_folder(config.save_path)
        monitor.hold(save_path)
        return cls(folder, spec, dataset, loader, evaluation_set, save_path)

    def order(self, config: TrainConfig) -> DataOrder:
        """What decides which samples a step sees."""
        return DataOrder(
            samples=len(self.dataset),
            fingerprint=self.dataset.fingerprint(),
            seed=config.seed,
            train_batch_size=config.train_batch_size,
            dataloader_drop_last=config.dataloader_drop_last,
            packed_epoch=self.loader.row_length if config.packing == "dataset" else 0,
            stream_gb=config.stream_gb,
        )

    def start(
        self, order: DataOrder, checkpoint: Path | None, total_steps: int, place: Place, monitor: RankMonitor
    ) -> None:
        """Tokenize the first records of a stream; any other set is there already."""
        if isinstance(self.dataset, Stream):
            waiting = partial(monitor.mark, "the data of the next step")
            start_stream(self.dataset, order, checkpoint, total_steps, place.local_rank == 0, waiting)


def run_job(config: TrainConfig, place: Place, monitor: RankMonitor, kind: type[Trainer]) -> None:
    """Train, from the beginning or from the newest checkpoint.

    Args:
        monitor: by which the run ends everywhere when it fails somewhere.
        kind: how the model is spread: `PipelineTrainer` or `ZeroTrainer`.
    """
    reporting = place.rank == 0
    log = Log(quiet=not reporting, highlight=False)
    stop = StopRequest()
    with agreed():
        inputs = Inputs.read(config, log, monitor)
    spec, loader, save_path = inputs.spec, inputs.loader, inputs.save_path
    division = divide(config, spec, kind.in_stages, None if isinstance(inputs.dataset, Stream) else loader)
    topology = division.topology
    total_steps = config.max_steps or config.n_epoches * loader.steps_per_epoch
    order = inputs.order(config)
    checkpoint = find_checkpoint(config, save_path, log)
    with agreed():
        if checkpoint:
            check_resumable(checkpoint, order, fixed_settings(config))
        inputs.start(order, checkpoint, total_steps, place, monitor)
    describe(config, inputs, division, total_steps, log)
    config = config.with_parts(topology.parts)  # what `auto` came to; the resolved config says so
    if reporting:
        (save_path / "config.yml").write_text(yaml.safe_dump(config.dump(), sort_keys=False), encoding="utf-8")
    if checkpoint:
        trainer, done = resume(checkpoint, division, config, kind, spec, inputs.folder, total_steps, log)
        log.print(f"resumed: {checkpoint}, after step {done}")
    else:
        trainer, done = kind.build(config, spec, inputs.folder, division, total_steps), 0
    record = CheckpointRecord(step=done, topology=topology, data=order, settings=fixed_settings(config))
    checkpointer = Checkpointer(
        trainer, config, save_path, inputs.folder, record, log, Best.read(save_path, done) if checkpoint else None
    )
    evaluation = None
    if inputs.evaluation_set:
        evaluation = Evaluation(inputs.evaluation_set, config, topology.replicas, loader.steps_per_epoch, reporting)
    bad_steps = BadSteps(config.max_bad_steps, config.fp16.enabled, inputs.dataset, log, reporting)
    utilization = Utilization(spec, training_dtype(config), place.world_size)
    steps = config.profile_steps
    timeline = Timeline(steps, trainer, spec, topology.parts, save_path, log) if steps else None
    with agreed():
        trackers = open_trackers(config, save_path, done + 1) if reporting else []
        if reporting:
            write_run_info(save_path, config, topology.parts, done + 1)
    with Reporter(save_path, total_steps, reporting, config.steps_per_print, done + 1, trackers) as reporter:
        run = Run(
            trainer=trainer,
            loader=loader,
            checkpointer=checkpointer,
            reporter=reporter,
            stop=stop,
            monitor=monitor,
            bad_steps=bad_steps,
            evaluation=evaluation,
            utilization=utilization,
            done=done,
            total_steps=total_steps,
            stages=topology.stages,
            timeline=timeline,
        )
        done = train(run)
    if timeline:
        timeline.finish()
    saved = step_folder(save_path, done)
    if done < total_steps:
        log.print(f"stopped after step {done} of {total_steps}; the same command goes on from there: {saved}")
        sys.exit(stop.exit_code)
    finish(config, topology.layers(trainer.stage, spec.n_layers), saved, log)
    if isinstance(inputs.dataset, Stream):
        inputs.dataset.close()


def describe(config: TrainConfig, inputs: Inputs, division: Division, total_steps: int, log: Console) -> None:
    """Choose the attention and say what is about to run."""
    spec = inputs.spec
    log.print(f"model: {spec.family.name}, {spec.n_layers} layers {division.topology.told}")
    for line in division.report:
        log.print(line)
    attention = choose_attention(config.use_flash_attn, training_dtype(config), spec.attention)
    spec.set_attention(attention.implementation)
    log.print(f"attention: {attention.reason}")
    tokens = chunk_tokens(spec.config.vocab_size, on_cpu=not torch.cuda.is_available())
    log.print(f"loss: {tokens:,} tokens at a time, summed in fp32")
    if config.zero_optimization.offloads and config.zero_force_ds_cpu_optimizer:
        log.print("optimizer: on the CPU; DeepSpeed compiles its part at the first use, about a minute")
    streamed = isinstance(inputs.dataset, Stream)
    known = inputs.dataset.shown if isinstance(inputs.dataset, Stream) else inputs.dataset
    if not log.quiet and known is not None:
        packing = packing_told(inputs.loader, len(known))
        what = "this window" if streamed else "an epoch"
        report(known, inputs.evaluation_set, config.max_seq_len, log, inputs.save_path, packing, what)
    an_epoch = f", {inputs.loader.steps_per_epoch} an epoch" if not streamed else ""
    what = "rows" if config.packing == "dataset" else "samples"
    log.print(f"steps: {total_steps} of {config.train_batch_size} {what}{an_epoch}")


def finish(config: TrainConfig, layers: Sequence[int], saved: Path, log: Console) -> None:
    """See that the last checkpoint is there, and export it where the config asks for that.

    Args:
        layers: those that this rank's stage holds.
        saved: the checkpoint.

    Raises:
        RunRefused: on every rank, where it could not be saved or exported.
    """
    with agreed():
        if not (saved / RECORD).is_file():
            raise ConfigError(
                f"save_path: the last checkpoint, {saved}, could not be saved; the same command tries again"
            )
    log.print(f"saved: {saved}")
    if config.export_hf:
        target = saved.parent / "hf"
        export_run(saved, target, layers)
        log.print(f"exported: {target}")


def make_run_folder(save_path: str) -> Path:
    """The run's folder, made where it does not exist."""
    folder = Path(save_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_path: {folder}: cannot be made: {error.strerror}; expected a folder") from None
    return folder
