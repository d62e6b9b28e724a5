"""The training loop: one global batch after the other, with checkpoints, evaluation and a clean end in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml

from common.whole_files import replace_text
from data.loader import Loader
from models.checkpoint.publish import writing
from training.bad_steps import BadSteps
from training.checkpoint.folder import CheckpointRecord, step_folder
from training.checkpoint.saving import Checkpointer
from training.config.changes import settings_of
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.freed_memory import FreedMemory
from training.distributed.processes import agreed
from training.distributed.rank_monitor import RankMonitor
from training.distributed.signals import StopRequest
from training.engine.trainer import Trainer
from training.errors import ConfigError, RunRefused
from training.evaluation import Evaluation
from training.metrics.peak_memory import peak_memory_by_stage
from training.metrics.reporter import Reporter
from training.metrics.run_info import CONFIG_FILE, write_run_info
from training.metrics.step_metrics import StepMetrics
from training.metrics.tracking import open_trackers
from training.optimizer.lr_schedules import LearningRate
from training.plan.feedback import Feedback
from training.profiler.session import Timeline
from training.progress import Progress
from training.topology import Topology


@dataclass
class Run:
    """What a loop works with. All ranks make it together.

    Attributes:
        config: with all that `auto` came to.
        origin: says of a sample's number where it comes from.
        evaluation: on the records to evaluate on, if any.
        utilization: see `training.metrics.utilization`.
        side_files: what makes a folder of layer files a model, on the rank that keeps the run's folder.
        feedback: measures the first steps of a pipeline.

    Raises:
        RunRefused: on every rank, where the run's folder or a tracker cannot be written.
    """

    config: TrainConfig
    progress: Progress
    topology: Topology
    trainer: Trainer
    disk: Disk
    loader: Loader
    monitor: RankMonitor
    stop: StopRequest
    origin: Callable[[int], str]
    evaluation: Evaluation | None = None
    utilization: Callable[[Collection[int], int, float], float | None] = lambda *_: None
    side_files: dict[str, bytes] = field(default_factory=dict)
    feedback: Feedback | None = None

    def __post_init__(self) -> None:
        config, progress, trainer, log = self.config, self.progress, self.trainer, self.progress.log
        folder, first, reporting = Path(config.save_path), progress.done + 1, not log.quiet
        records = self.evaluation.records if self.evaluation else ""
        settings = settings_of(progress.config)
        record = CheckpointRecord(step=progress.done, topology=self.topology, data=progress.order, settings=settings)
        self.checkpointer = Checkpointer(trainer, config, folder, self.disk, self.side_files, record, log, records)
        self.bad_steps = BadSteps(trainer, config.max_bad_steps, self.origin, log, self.monitor.mark)
        self.learning_rate = LearningRate(trainer.engine.basic_optimizer, config.scheduler, progress.total_steps)
        steps, parts = config.profile_steps, self.topology.parts
        self.timeline = Timeline(steps, trainer, parts, folder, log) if steps else None
        with agreed(), writing(folder):
            trackers = open_trackers(config, folder, first) if reporting else []
            if reporting:
                write_run_info(folder, config, parts, first)
                replace_text(folder / CONFIG_FILE, yaml.safe_dump(config.dump(), sort_keys=False))
            last, each = progress.total_steps, config.steps_per_print
            self.reporter = Reporter(folder, last, reporting, each, first, trackers, progress.evaluate_first, parts)


def train(run: Run) -> int:
    """Run the optimizer steps that are left and report each; the number of the last one done.

    Every rank walks through the same global batches. The state is saved where the config asks for it, when somebody
    asks the run to stop, and at the end. A run that is to go on in better parts ends with its next checkpoint.
    """
    with run.reporter:
        try:
            done = _train(run, run.progress.done, run.progress.total_steps)
        except RunRefused:  # on every rank, so they can finish a save together
            with suppress(ConfigError):
                run.checkpointer.settle()
            raise
    if run.timeline:
        run.timeline.finish()
    return done


def _train(run: Run, done: int, total_steps: int) -> int:
    if done < total_steps and run.stop.agreed(False)[0]:  # the request came while the run was loading
        return done
    if run.progress.evaluate_first:
        found = evaluate(run, done)
        if found is None:
            return done
        # A checkpoint of another folder (`resume`) is not this run's to name.
        newest, taken_up = step_folder(Path(run.config.save_path), done), run.progress.checkpoint
        if taken_up and taken_up.resolve() == newest.resolve():
            run.checkpointer.note(done, found)
    freed_memory = FreedMemory(kept=not torch.cuda.is_available())
    for step in range(done + 1, total_steps + 1):
        _step(run, step)
        if run.feedback:
            run.feedback.compare(run.trainer.stage, step)
        freed_memory.bound()
        if run.timeline and step == run.timeline.steps[1]:
            run.timeline.finish()
        run.checkpointer.settle_if_written()
        stopping, due = run.stop.agreed(run.checkpointer.due(step))
        last = step == total_steps
        # Before the save: a run that is killed in between repeats the step, and the evaluation with it. One that has to
        # stop saves at once, and the next start evaluates; after the last step there may be no next one.
        loss = None
        if run.evaluation and run.evaluation.due(step, last) and (last or not stopping):
            loss = evaluate(run, step)
            stopping = stopping or loss is None
            run.checkpointer.settle()  # which may be the best so far
        if due or stopping or last or (loss is not None and run.checkpointer.is_best(loss)):
            with run.trainer.timings("checkpoint"):
                run.checkpointer.save(step, loss)
            run.monitor.mark(f"the checkpoint of step {step}")
        moving = run.feedback and run.feedback.moves
        if stopping or last or moving:
            run.checkpointer.settle()
        if stopping or (moving and run.checkpointer.saved == step):
            return step
    return total_steps


def evaluate(run: Run, step: int) -> float | None:
    """Measure and report the evaluation loss; None where the run is asked to stop meanwhile, but for the last step."""
    assert run.evaluation is not None
    last = step == run.progress.total_steps
    found = run.evaluation.run(run.trainer, run.monitor, lambda: not last and run.stop.agreed(False)[0])
    if found is None:
        return None
    run.reporter.report_evaluation(step, found)
    return found["eval_loss"]


def _step(run: Run, step: int) -> None:
    begin = time.monotonic()
    with run.trainer.timings("data"):
        batch = run.loader.batch(step - 1)
    lr = run.learning_rate.set(step)
    with (
        run.timeline.step(step) if run.timeline else nullcontext(),
        run.feedback.step(run.trainer.engine, step, batch) if run.feedback else nullcontext(),
    ):
        loss = run.trainer.train_step(run.loader, batch)
    seconds = time.monotonic() - begin
    norm = run.trainer.engine.get_global_grad_norm()
    grad_norm = 0.0 if norm is None else float(norm)
    run.monitor.mark(f"step {step}")
    run.reporter.report(
        StepMetrics(
            step=step,
            epoch=run.loader.epoch(step - 1) + 1,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            samples=len(batch.lengths),
            tokens=batch.tokens,
            supervised=batch.supervised,
            tokens_per_s=batch.tokens / seconds,
            seconds=seconds,
            mfu=run.utilization(batch.lengths, batch.supervised, seconds),
            times=run.trainer.timings.take(),
            peak_memory=peak_memory_by_stage(run.trainer.stage, run.topology.stages),
        )
    )
    run.bad_steps.check(run.loader, batch, step, loss, grad_norm)
