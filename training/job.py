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

from common.log import Log
from common.whole_files import replace_text
from data.inspection import summary
from data.loader import Loader
from data.streaming.stream import Stream
from data.tokenized.dataset import Dataset, check_vocabulary
from models.checkpoint.layout import resolve
from models.checkpoint.publish import try_publishing, writing
from models.flops import ModelFlops
from models.lean_loss import chunk_tokens
from models.spec import ModelSpec
from training.bad_steps import BadSteps
from training.checkpoint.exporting import EXPORTED
from training.checkpoint.folder import CheckpointRecord, DataOrder, step_folder
from training.checkpoint.resume import check_resumable, check_same_model, find_checkpoint, resume
from training.checkpoint.saving import Checkpointer, read_side_files
from training.config.changes import settings_of
from training.config.deepspeed_config import check_fp8, router_loss_weight, training_dtype
from training.config.keys import TrainConfig
from training.data_setup import RecordReader, build_loader
from training.distributed.processes import Place, agreed
from training.distributed.rank_monitor import RankMonitor
from training.distributed.signals import StopRequest
from training.engine.numerics import describe_numerics
from training.engine.trainer import Trainer
from training.evaluation import Evaluation
from training.finish import finish
from training.loop import Run, train
from training.metrics.reporter import Reporter
from training.metrics.run_info import write_run_info
from training.metrics.tracking import open_trackers
from training.metrics.utilization import Utilization
from training.optimizer.lr_schedules import LearningRate
from training.plan.auto import divide
from training.plan.feedback import Feedback
from training.plan.kernels import choose_kernels
from training.plan.out_of_memory import OutOfMemory
from training.preflight import check_model, check_setup, check_shared, expect_same
from training.profiler.session import Timeline
from training.topology import Topology


@dataclass
class Inputs:
    """What a run is made of, read and checked before anything is built.

    Attributes:
        folder: the resolved `model_path`.
        dataset: the records to train on; a stream of them is not started yet.
        evaluation: on the records to evaluate on, if any.
        side_files: of the model, on rank 0.
    """

    folder: Path
    spec: ModelSpec
    dataset: Dataset | Stream
    loader: Loader
    evaluation: Evaluation | None
    side_files: dict[str, bytes]

    @classmethod
    def read(cls, config: TrainConfig, log: Console, monitor: RankMonitor) -> Inputs:
        """Read model config and records, make the run's folder and take its lease."""
        folder = resolve(config.model_path)
        spec = ModelSpec.from_folder(folder)
        config.parts_for(spec.n_layers)  # checked before the data are read, which takes longer
        check_fp8(config, spec)
        reader = RecordReader(config, folder, log)
        dataset = reader.stream() if config.stream_gb else reader.read("data", config.data_path)
        replicas, router_loss = config.model_topo.replicas, router_loss_weight(config, spec) > 0
        loader = build_loader(dataset, config, replicas, config.dataloader_drop_last, router_loss=router_loss)
        evaluation, sets = None, [dataset]
        if config.eval_data_path:
            sets.append(records := reader.read("evaluation data", config.eval_data_path))
            evaluation = Evaluation(records, config, replicas, loader.steps_per_epoch, active=not log.quiet)
        check_vocabulary(reader.tokenizer, int(spec.config.vocab_size), *sets)
        side_files = {} if log.quiet else read_side_files(folder)
        monitor.hold(Path(config.save_path))
        return cls(folder, spec, dataset, loader, evaluation, side_files)

    def start(self, start: Start, place: Place, monitor: RankMonitor) -> None:
        """Tokenize what the first batch of a stream needs; any other set is there already."""
        stream = self.dataset
        if not isinstance(stream, Stream):
            return
        if start.known:
            stream.resume(start.known.data.windows)
        start.order.windows = stream.windows.made  # what becomes known of the stream goes into each checkpoint
        size = start.order.train_batch_size
        if place.local_rank == 0:  # on each host one makes windows ahead, and removes old ones
            stream.until = start.total_steps * size
        if start.done < start.total_steps:
            stream.take(start.done * size, size)
        stream.waiting = partial(monitor.mark, "the data of the next step")  # from now on; a start may take its time


@dataclass(frozen=True)
class Start:
    """Where a run begins: at a checkpoint, or at step 1.

    Attributes:
        known: what the checkpoint says of itself.
        order: of the data.
        evaluate_first: whether the evaluation after the steps that are done is still due.
    """

    checkpoint: Path | None
    known: CheckpointRecord | None
    order: DataOrder
    total_steps: int
    evaluate_first: bool

    @classmethod
    def find(cls, config: TrainConfig, inputs: Inputs, log: Console) -> Start:
        """Look for a checkpoint, see that the run may go on from it, and say what changed; all ranks call it together.

        Raises:
            RunRefused: on every rank, where something differs that must agree.
        """
        order = DataOrder(
            samples=len(inputs.dataset),
            fingerprint=inputs.dataset.fingerprint(),
            seed=config.seed,
            train_batch_size=config.train_batch_size,
            dataloader_drop_last=config.dataloader_drop_last,
            packed_epoch=inputs.loader.row_length if config.packing == "dataset" else 0,
            stream_gb=config.stream_gb,
        )
        evaluated_on = inputs.evaluation.records if inputs.evaluation else "none"
        check_shared(Path(config.save_path))
        expect_same({"samples of data_path": order.fingerprint, "samples of eval_data_path": evaluated_on})
        total_steps = config.max_steps or config.n_epoches * inputs.loader.steps_per_epoch
        checkpoint = find_checkpoint(config, Path(config.save_path), log)
        check_model(inputs.folder, weights=checkpoint is None and not config.from_scratch)
        known = CheckpointRecord.read(checkpoint) if checkpoint else None
        changes: list[str] = []
        with agreed():
            if checkpoint and known:
                check_same_model(checkpoint, inputs.spec)
                changes = check_resumable(checkpoint, known, order, config)
        for line in changes:
            log.print(line)
        done, evaluated = (known.step, known.evaluated) if known else (0, False)
        due = inputs.evaluation is not None and inputs.evaluation.due(done, last=done == total_steps)
        return cls(checkpoint, known, order, total_steps, due and not evaluated)

    @property
    def done(self) -> int:
        """The last step that is done."""
        return self.known.step if self.known else 0


def run_job(config: TrainConfig, place: Place, monitor: RankMonitor, kind: type[Trainer]) -> bool:
    """Train, from the beginning or from the newest checkpoint; whether the run is to start over, in better parts.

    Args:
        monitor: by which the run ends everywhere when it fails somewhere.
        kind: how the model is spread: `PipelineTrainer` or `ZeroTrainer`.
    """
    reporting = place.rank == 0
    log = Log(quiet=not reporting, highlight=False)
    stop = StopRequest()
    check_setup(config, log)
    with agreed():
        inputs = Inputs.read(config, log, monitor)
    spec, loader, save_path = inputs.spec, inputs.loader, Path(config.save_path)
    known_loader = None if isinstance(inputs.dataset, Stream) else loader
    start = Start.find(config, inputs, log)
    division = divide(config, spec, kind.in_stages, known_loader, start.known)
    topology = division.topology
    checkpoint, done, total_steps = start.checkpoint, start.done, start.total_steps
    layers = topology.layers(config.model_topo.stage_of(place.rank), spec.n_layers)
    if checkpoint and (done > total_steps or (done == total_steps and not start.evaluate_first)):
        finish_again(config, layers, start, inputs.folder, log)
        return False
    with agreed():
        inputs.start(start, place, monitor)
    kernels = choose_kernels(config, spec, known_loader)
    describe(config, inputs, [*division.report, *kernels.report], topology, total_steps, log)
    record = CheckpointRecord(step=done, topology=topology, data=start.order, settings=settings_of(config))
    feedback = Feedback(config, spec, division, known_loader, done + 1, log) if kind.in_stages else None
    # What `auto` came to; the resolved config says so.
    config = config.with_parts(topology.parts).model_copy(update={"compile": kernels.compile})
    begin(config, inputs, reporting)
    memory = OutOfMemory(config, spec, config.model_topo.stage_of(place.rank), known_loader)
    with memory:
        trainer = (
            resume(checkpoint, start.known, division, config, kind, spec, log)
            if checkpoint and start.known
            else kind.build(config, spec, inputs.folder, division)
        )
    eval_records = inputs.evaluation.records if inputs.evaluation else ""
    checkpointer = Checkpointer(trainer, config, save_path, inputs.side_files, record, log, eval_records)
    steps = config.profile_steps
    timeline = Timeline(steps, trainer, ModelFlops(spec).by_layer, topology.parts, save_path, log) if steps else None
    with agreed(), writing(save_path):
        trackers = open_trackers(config, save_path, done + 1) if reporting else []
        if reporting:
            write_run_info(save_path, config, topology.parts, done + 1)
        reporter = Reporter(
            save_path, total_steps, reporting, config.steps_per_print, done + 1, trackers, start.evaluate_first
        )
    with memory, reporter:
        run = Run(
            trainer=trainer,
            loader=loader,
            checkpointer=checkpointer,
            reporter=reporter,
            stop=stop,
            monitor=monitor,
            bad_steps=BadSteps(trainer, config.max_bad_steps, inputs.dataset.origin, log, reporting),
            evaluation=inputs.evaluation,
            utilization=Utilization(spec, training_dtype(config), place.world_size),
            learning_rate=LearningRate(trainer.engine.basic_optimizer, config.scheduler, total_steps),
            done=done,
            evaluate_first=start.evaluate_first,
            total_steps=total_steps,
            stages=topology.stages,
            timeline=timeline,
            feedback=feedback,
        )
        done = train(run)
    if timeline:
        timeline.finish()
    if feedback and feedback.moves and done < total_steps and not stop.agreed(False)[0]:
        log.print(f"rebalance: after step {done} of {total_steps} the same command goes on in better parts")
        return True
    saved = checkpoint if checkpoint and start.done == done else step_folder(save_path, done)
    if done < total_steps:
        log.print(f"stopped after step {done} of {total_steps}; the same command goes on from there: {saved}")
        sys.exit(stop.exit_code)
    finish(config, layers, saved, inputs.folder, log)
    if isinstance(inputs.dataset, Stream):
        inputs.dataset.close()
    return False


def begin(config: TrainConfig, inputs: Inputs, reporting: bool) -> None:
    """Note the config in the run's folder, and see that its export will have a place there."""
    save_path = Path(config.save_path)
    with agreed(), writing(save_path):
        if reporting:
            replace_text(save_path / "config.yml", yaml.safe_dump(config.dump(), sort_keys=False))
        if reporting and config.export_hf:
            try_publishing(save_path / EXPORTED, True, [inputs.folder])


def describe(
    config: TrainConfig, inputs: Inputs, report: list[str], topology: Topology, total_steps: int, log: Console
) -> None:
    """Say what is about to run, and what was chosen for it."""
    model = f"model: {inputs.spec.family.name}, {inputs.spec.n_layers} layers {topology.description}"
    for line in [model, *report, *describe_numerics(config)]:
        log.print(line)
    tokens = chunk_tokens(inputs.spec.config.vocab_size, on_cpu=not torch.cuda.is_available())
    log.print(f"loss: {tokens:,} tokens at a time, summed in fp32")
    if config.zero_optimization.offloads and config.zero_force_ds_cpu_optimizer:
        log.print("optimizer: on the CPU; DeepSpeed compiles its part at the first use, about a minute")
    streamed = isinstance(inputs.dataset, Stream)
    known = inputs.dataset.shown if isinstance(inputs.dataset, Stream) else inputs.dataset
    if not log.quiet and known is not None:
        what = "this window" if streamed else "an epoch"
        evaluated_on = inputs.evaluation.dataset if inputs.evaluation else None
        folder = Path(config.save_path)
        summary.report(known, evaluated_on, inputs.loader, config.max_seq_len, folder, log, what)
    an_epoch = f", {inputs.loader.steps_per_epoch} an epoch" if not streamed else ""
    what = "rows" if config.packing == "dataset" else "samples"
    log.print(f"steps: {total_steps} of {config.train_batch_size} {what}{an_epoch}")


def finish_again(config: TrainConfig, layers: Sequence[int], start: Start, model_folder: Path, log: Console) -> None:
    """Say that nothing is left to train, and make up for what belongs to the end of a run; see `finish`."""
    assert start.checkpoint
    asking = "max_steps asks" if config.max_steps else "n_epoches ask"
    log.print(f"nothing to train: {start.checkpoint} has {start.done} steps done, and {asking} for {start.total_steps}")
    if start.done == start.total_steps:
        finish(config, layers, start.checkpoint, model_folder, log)
