"""The options of a run, in one place: which callbacks a job has, and the jobs that entry points start.

Order matters: metrics are completed before they are reported, and a step is reported before it may end the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from data.loader import GlobalBatch
from training.bad_steps import BadSteps
from training.callbacks import Callback
from training.config.keys import TrainConfig
from training.distributed.freed_memory import BoundedMemory
from training.distributed.processes import Place
from training.distributed.rank_monitor import RankMonitor
from training.engine.trainer import Trainer
from training.job import Job
from training.language_model import LanguageModel
from training.loop import Run
from training.metrics.step_metrics import StepMetrics
from training.metrics.utilization import Mfu
from training.model_card import ExportHF
from training.plan.auto import divide
from training.plan.feedback import Feedback
from training.plan.kernels import choose_kernels
from training.plan.out_of_memory import out_of_memory_told
from training.plan.room import check_room
from training.profiler.session import ProfiledSteps
from training.reporting import DataSummary, Reporting
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
    planned: list[Callback] = [DataSummary(task), Planning(task), Mfu(task)]
    measured: list[Callback] = [PlanFeedback(task)] if task.in_stages else []
    exported: list[Callback] = [ExportHF()] if config.export_hf else []
    return [*planned, *run_options(config), *measured, *exported]


def run_options(config: TrainConfig) -> list[Callback]:
    """The callbacks of any run."""
    timeline: list[Callback] = [ProfiledSteps()] if config.profile_steps else []
    return [Reporting(), BadSteps(), *timeline, BoundedMemory()]


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
