"""The options of a run, in one place: which callbacks a job has, and the jobs that entry points start.

Order matters: metrics are completed before they are reported, and a step is reported before it may end the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from data.loader import GlobalBatch
from models.checkpoint.publish import try_publishing
from training.bad_steps import BadSteps
from training.callbacks import Callback
from training.checkpoint.exporting import EXPORTED, export_run
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.distributed.freed_memory import FreedMemory
from training.distributed.processes import Place, agreed
from training.distributed.rank_monitor import RankMonitor
from training.engine.trainer import Trainer
from training.job import Job
from training.language_model import LanguageModel
from training.loop import Run
from training.metrics.reporting import Reporting
from training.metrics.step_metrics import StepMetrics
from training.metrics.utilization import Utilization
from training.plan.auto import divide
from training.plan.feedback import Feedback
from training.plan.kernels import choose_kernels
from training.plan.out_of_memory import out_of_memory_told
from training.plan.room import check_room
from training.profiler.session import Timeline
from training.streamed import StreamedLanguageModel


def train_language_model(
    config: TrainConfig,
    place: Place,
    monitor: RankMonitor,
    kind: type[Trainer],
    callbacks: Sequence[Callback] = (),
) -> bool:
    """Do one rank's whole job; return whether the processes are to start over.

    Args:
        monitor: ends the run everywhere when it fails somewhere.
        kind: how the model is spread: `PipelineTrainer` or `ZeroTrainer`.
        callbacks: of the caller, after those of the options.
    """
    task = language_model(config, kind)
    return Job(task, config, place, monitor, [*options(config, task), *callbacks]).run()


def language_model(config: TrainConfig, kind: type[Trainer]) -> LanguageModel:
    """The task of a config."""
    return StreamedLanguageModel(kind) if config.stream_gb else LanguageModel(kind)


def options(config: TrainConfig, task: LanguageModel) -> list[Callback]:
    """The callbacks of a language model's run."""
    planned: list[Callback] = [Planning(task), Mfu(task)]
    measured: list[Callback] = [PlanFeedback(task)] if task.in_stages else []
    exported: list[Callback] = [Export(task)] if config.export_hf else []
    return [*planned, *run_options(config), *measured, *exported]


def run_options(config: TrainConfig) -> list[Callback]:
    """The callbacks of any run."""
    timeline: list[Callback] = [ProfiledSteps()] if config.profile_steps else []
    return [Reporting(), LimitBadSteps(), *timeline, BoundMemory()]


class Planning(Callback):
    """Resolve `auto` by the planner, check memory and disk, choose kernels, explain an out-of-memory error."""

    def __init__(self, task: LanguageModel) -> None:
        self._task = task

    def on_divide(self, job: Job) -> None:
        task = self._task
        job.division = divide(job.config, task.spec, task.in_stages, task.known_loader, job.progress.known)

    def on_build(self, job: Job) -> None:
        check_room(job.config, self._task.spec, job.layers, job.disk)
        kernels = choose_kernels(job.config, self._task.spec, self._task.known_loader)
        job.report += kernels.report
        job.config = job.config.model_copy(update={"compile": kernels.compile})

    def around(self, job: Job) -> AbstractContextManager[None]:
        return out_of_memory_told(job.config, self._task.spec, job.stage, self._task.known_loader)


class PlanFeedback(Callback):
    """Compare the first steps with the plan; `rebalance: true` restarts the run with a better stage split."""

    def __init__(self, task: LanguageModel) -> None:
        self._task = task
        self._feedback: Feedback

    def on_build(self, job: Job) -> None:
        progress, task = job.progress, self._task
        first, last = progress.done + 1, progress.total_steps
        self._feedback = Feedback(progress.config, task.spec, job.division, task.known_loader, first, last, job.log)

    def around_step(self, run: Run, step: int, batch: GlobalBatch) -> AbstractContextManager[None]:
        return self._feedback.step(run.trainer.engine, step, batch)

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        self._feedback.compare(run.trainer.stage, metrics.step)
        if self._feedback.moves:
            run.restart = "rebalance"


class Mfu(Callback):
    """Add the model FLOPs utilization to a step's metrics."""

    def __init__(self, task: LanguageModel) -> None:
        self._task = task
        self._utilization: Utilization

    def on_build(self, job: Job) -> None:
        self._utilization = Utilization(self._task.spec, training_dtype(job.config), job.place.world_size)

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        metrics.mfu = self._utilization(batch.lengths, batch.supervised, metrics.seconds)


class LimitBadSteps(Callback):
    """End a run after `max_bad_steps` steps in a row without a finite loss, and name the records (`bad_steps`)."""

    def __init__(self) -> None:
        self._bad_steps: BadSteps

    def on_start(self, run: Run) -> None:
        log = run.progress.log
        self._bad_steps = BadSteps(run.trainer, run.config.max_bad_steps, run.origin, log, run.mark)

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        self._bad_steps.check(run.loader, batch, metrics.step, metrics.loss, metrics.grad_norm)


class BoundMemory(Callback):
    """Give main memory back that steps on a CPU have freed, before it piles up (`freed_memory`)."""

    def __init__(self) -> None:
        self._freed: FreedMemory

    def on_start(self, run: Run) -> None:
        self._freed = FreedMemory(kept=not torch.cuda.is_available())

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        self._freed.bound()


class ProfiledSteps(Callback):
    """Record the steps of `profile_steps` and draw their timeline."""

    def __init__(self) -> None:
        self._timeline: Timeline

    def on_start(self, run: Run) -> None:
        steps, folder = run.config.profile_steps, Path(run.config.save_path)
        assert steps is not None
        self._timeline = Timeline(steps, run.trainer, run.topology.parts, folder, run.progress.log)

    def around_step(self, run: Run, step: int, batch: GlobalBatch) -> AbstractContextManager[None]:
        return self._timeline.step(step)

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        if metrics.step == self._timeline.steps[1]:
            self._timeline.finish()

    def on_end(self, run: Run, step: int) -> None:
        self._timeline.finish()


class Export(Callback):
    """Write the trained model as a HuggingFace folder (`export_hf`)."""

    def __init__(self, task: LanguageModel) -> None:
        self._task = task

    def on_build(self, job: Job) -> None:
        with agreed():
            if job.place.rank == 0:  # no run of days is to find out at its end
                try_publishing(job.save_path / EXPORTED, [self._task.model_folder])

    def on_finish(self, job: Job, checkpoint: Path) -> None:
        from training.model_card import write_card  # imports matplotlib, which takes two seconds

        target = job.save_path / EXPORTED
        export_run(checkpoint, target, job.layers, self._task.model_folder, write_card)
        job.log.print(f"exported: {target}")
