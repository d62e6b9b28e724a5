"""List the options of a run in one place: its callbacks, and the job that entry points start.

Order matters: metrics are completed before they are reported, and a step is reported before it may end the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.api import read_spec
from options.planner.feedback import Feedback
from options.planner.planning import Planning
from options.planner.utilization import Mfu
from options.weight_streaming.trainer import WeightStreamingTrainer
from training.bad_steps import BadSteps
from training.callbacks import Callback
from training.checkpoint.exporting import ExportHF
from training.config.keys import TrainConfig
from training.distributed.freed_memory import BoundedMemory
from training.distributed.processes import ProcessInfo
from training.distributed.rank_monitor import RankMonitor
from training.engine.pipeline import PipelineTrainer
from training.engine.trainer import Trainer
from training.job import Job, Task
from training.language_model import LanguageModel, language_model_of
from training.option import options_of
from training.reporting import DataSummary, Reporting
from training.schedule.instructions import WEIGHT_STREAMING


def train_language_model(
    config: TrainConfig,
    process: ProcessInfo,
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
    return Job(task, config, process, monitor, [*options(config, task), *callbacks]).run()


def pipeline_trainer(config: TrainConfig) -> type[Trainer]:
    """Return how a config's stages work: as DeepSpeed's pipeline, or taking turns at all layers."""
    return WeightStreamingTrainer if config.schedule == WEIGHT_STREAMING else PipelineTrainer


def language_model(config: TrainConfig, kind: type[Trainer]) -> LanguageModel:
    """Return the task of a config."""
    return language_model_of(config)(kind, read_spec)


def options(config: TrainConfig, task: LanguageModel) -> list[Callback]:
    """List the callbacks of a language model's run."""
    planned: list[Callback] = [DataSummary(task), Planning(task), Mfu(task)]
    measured: list[Callback] = [Feedback(task)] if task.in_stages and config.schedule != WEIGHT_STREAMING else []
    exported: list[Callback] = [ExportHF()] if config.export_hf else []
    return [*planned, *config.objective.callbacks(task), *run_options(config, task), *measured, *exported]


def run_options(config: TrainConfig, task: Task) -> list[Callback]:
    """List the callbacks of any run."""
    optional: list[Callback] = []
    for option in options_of(config):
        optional += option.callbacks(config, task)
    return [Reporting(), BadSteps(), *optional, BoundedMemory()]
