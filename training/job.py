"""The whole job of one rank, the same for both training doors: model, data, engine, resume, loop, export."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from common.log import Log
from data.inspection import summary
from data.loader import Loader
from data.streaming.stream import Stream
from data.tokenized.dataset import Dataset, check_vocabulary
from models.api import read_spec
from models.checkpoint.layout import resolve
from models.checkpoint.publish import try_publishing
from models.lean_loss import chunk_tokens
from models.spec import ModelSpec
from training.checkpoint.exporting import EXPORTED
from training.checkpoint.folder import DataOrder
from training.checkpoint.resume import check_same_model, resume
from training.checkpoint.side_files import read_side_files
from training.checkpoint.tidying import best_so_far, make_room
from training.config.deepspeed_config import (
    check_device,
    check_fp8,
    check_shared_rows,
    check_tensor,
    router_loss_weight,
    training_dtype,
)
from training.config.keys import TrainConfig
from training.config.passed_on import unheeded
from training.data_setup import RecordReader, build_loader
from training.distributed.disk import Disk
from training.distributed.processes import Place, agreed, set_threads
from training.distributed.rank_monitor import RankMonitor
from training.distributed.signals import StopRequest
from training.engine.numerics import describe_numerics, set_numerics
from training.engine.trainer import Trainer
from training.evaluation import Evaluation
from training.loop import Run, train
from training.metrics.utilization import Utilization
from training.plan.auto import divide
from training.plan.feedback import Feedback
from training.plan.kernels import choose_kernels
from training.plan.out_of_memory import out_of_memory_told
from training.plan.room import check_room
from training.preflight import check_folder, check_model, check_setup, check_writable
from training.progress import Progress


@dataclass
class Inputs:
    """What a run is made of, read and checked before anything is built.

    Attributes:
        folder: the resolved `model_path`.
        dataset: the records to train on; a stream of them is not started yet.
        evaluation: on the records to evaluate on, if any.
        side_files: of the model, on the rank that keeps the run's folder.
        disk: that the run's folder is on.
    """

    folder: Path
    spec: ModelSpec
    dataset: Dataset | Stream
    loader: Loader
    evaluation: Evaluation | None
    side_files: dict[str, bytes]
    disk: Disk

    @classmethod
    def together(cls, config: TrainConfig, place: Place, monitor: RankMonitor, log: Console) -> Inputs:
        """Read by all ranks, once their hosts are alike; the run's folder is theirs from then on.

        Raises:
            RunRefused: on every rank, where hosts differ, or one cannot read something.
        """
        check_setup(config, log)
        disk = Disk.of(config.storage, place, config.model_topo)
        with agreed():
            if disk.keeps:
                check_writable("save_path", Path(config.save_path))
            inputs = cls.read(config, disk, log)
        check_folder(Path(config.save_path), disk, log)
        with agreed():
            monitor.hold(Path(config.save_path), disk)
        return inputs

    @classmethod
    def read(cls, config: TrainConfig, disk: Disk, log: Console) -> Inputs:
        """Read model config and records."""
        folder = resolve(config.model_path)
        spec = read_spec(folder)
        check_device(config)
        config.parts_for(spec.n_layers)  # checked before the data are read, which takes longer
        check_fp8(config, spec)
        check_tensor(config, spec)
        check_shared_rows(config, spec)
        reader = RecordReader(config, folder, log)
        dataset, held_out = reader.sets()
        router_loss = router_loss_weight(config, spec) > 0
        loader = build_loader(dataset, config, config.dataloader_drop_last, router_loss=router_loss)
        evaluation = None
        if held_out is not None:
            evaluation = Evaluation.on(held_out, config, loader.steps_per_epoch, active=not log.quiet)
        sets = [dataset] if held_out is None else [dataset, held_out]
        check_vocabulary(reader.tokenizer, int(spec.config.vocab_size), *sets)
        side_files = read_side_files(folder, reader.ends) if disk.keeps else {}
        return cls(folder, spec, dataset, loader, evaluation, side_files, disk)

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

    def begin(self, progress: Progress, place: Place, monitor: RankMonitor) -> None:
        """Tokenize what the first batch of a stream needs; any other set is there already."""
        stream = self.dataset
        if not isinstance(stream, Stream):
            return
        if progress.known:
            stream.resume(progress.known.data.windows)
        progress.order.windows = stream.windows.made  # what becomes known of the stream goes into each checkpoint
        size = progress.order.train_batch_size
        if place.local_rank == 0:  # on each host one makes windows ahead, and removes old ones
            stream.until = progress.total_steps * size
        if progress.done < progress.total_steps:
            stream.take(progress.done * size, size)
        stream.waiting = partial(monitor.mark, "the data of the next step")  # from now on; a start may take its time


def run_job(config: TrainConfig, place: Place, monitor: RankMonitor, kind: type[Trainer]) -> bool:
    """Train, from the beginning or from the newest checkpoint; whether the run is to start over, in better parts.

    Args:
        monitor: by which the run ends everywhere when it fails somewhere.
        kind: how the model is spread: `PipelineTrainer` or `ZeroTrainer`.
    """
    log, stop = Log(quiet=place.rank > 0, highlight=False), StopRequest(config.preemption_signals)
    inputs = Inputs.together(config, place, monitor, log)
    disk = inputs.disk
    spec, loader, stage = inputs.spec, inputs.loader, config.model_topo.stage_of(place.rank)
    known_loader = None if isinstance(inputs.dataset, Stream) else loader
    order, steps = inputs.order(config), loader.steps_per_epoch
    same_model = partial(check_same_model, spec)
    progress = Progress.find(config, disk, log, order, steps, inputs.evaluation, same_model)
    check_model(inputs.folder, weights=progress.checkpoint is None and not config.from_scratch)
    division = divide(config, spec, kind.in_stages, known_loader, progress.known)
    topology = division.topology
    layers = topology.layers(stage, spec.n_layers)
    if progress.is_over(layers, inputs.folder):
        return False
    save_path, records = Path(config.save_path), inputs.evaluation.records if inputs.evaluation else ""
    make_room(save_path, config.keep_last, best_so_far(save_path, progress.done, records), disk, log)
    check_room(config, spec, layers, disk)
    with agreed():
        inputs.begin(progress, place, monitor)
    if progress.done < progress.total_steps and stop.agreed(False)[0]:  # loading weights may take minutes
        progress.end(progress.done, stop, layers, inputs.folder)
    set_numerics(config)
    set_threads(place.local_size, spec.config.hidden_size)
    kernels = choose_kernels(config, spec, known_loader)
    model = f"model: {spec.family.name}, {spec.n_layers} layers {topology.description}"
    proof = [f"family: {spec.family.proof}"] if spec.family.proof else []
    report = [model, *proof, *division.report, *kernels.report, *unheeded(config, kind.in_stages)]
    describe(config, inputs, report, progress.total_steps, log)
    feedback = None
    if kind.in_stages:
        feedback = Feedback(config, spec, division, known_loader, progress.done + 1, progress.total_steps, log)
    # What `auto` came to; the resolved config says so.
    config = config.with_parts(topology.parts).model_copy(update={"compile": kernels.compile})
    with agreed():
        if config.export_hf and place.rank == 0:  # no run of days is to find out at its end
            try_publishing(save_path / EXPORTED, [inputs.folder])

    def build() -> Trainer:
        asked = config.model_copy(update={"from_scratch": config.from_scratch and not progress.checkpoint})
        return kind.build(asked, spec, progress.checkpoint or inputs.folder, division)

    with out_of_memory_told(config, spec, stage, known_loader):
        trainer = resume(progress.checkpoint, progress.known, topology, config, build, log, spec)
        run = Run(
            config=config,
            progress=progress,
            topology=topology,
            trainer=trainer,
            disk=disk,
            loader=loader,
            monitor=monitor,
            stop=stop,
            origin=inputs.dataset.origin,
            evaluation=inputs.evaluation,
            utilization=Utilization(spec, training_dtype(config), place.world_size),
            side_files=inputs.side_files,
            feedback=feedback,
        )
        done = train(run)
    if feedback and feedback.moves and done < progress.total_steps and not stop.agreed(False)[0]:
        log.print(f"rebalance: after step {done} of {progress.total_steps} the same command goes on in better parts")
        return True
    monitor.rest()  # an export takes as long as the model is large
    progress.end(done, stop, layers, inputs.folder)
    if isinstance(inputs.dataset, Stream):
        inputs.dataset.close()
    return False


def describe(config: TrainConfig, inputs: Inputs, report: list[str], total_steps: int, log: Console) -> None:
    """Say what is about to run, and what was chosen for it."""
    for line in [*report, *describe_numerics(config)]:
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
