"""Put a run together: the task, the kind of trainer and the callbacks, for the job that entry points start.

The order of callbacks: first what settles what others build on, and completes a step's numbers; then what reports them,
so that a step is reported before it may end the run; then the rest, in the order of the list of options.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.api import read_spec
from training.bad_steps import BadSteps
from training.callbacks import Callback
from training.checkpoint.exporting import ExportHF
from training.config.keys import TrainConfig
from training.distributed.freed_memory import BoundedMemory
from training.distributed.processes import ProcessInfo
from training.distributed.rank_monitor import RankMonitor
from training.engine.pipeline import PipelineTrainer
from training.engine.trainer import Trainer
from training.engine.zero import ZeroTrainer
from training.job import Job, Task
from training.language_model import LanguageModel, language_model_of
from training.option import options_of
from training.reporting import DataSummary, Reporting


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
    return Job(task, config, process, monitor, [*model_callbacks(config, task), *callbacks]).run()


def trainer_kind(config: TrainConfig, in_stages: bool = True) -> type[Trainer]:
    """Return what trains: DeepSpeed's pipeline, or ZeRO without stages, unless an option has another way."""
    kinds = (option.trainer(config, in_stages) for option in options_of(config))
    return next(filter(None, kinds), PipelineTrainer if in_stages else ZeroTrainer)


def language_model(config: TrainConfig, kind: type[Trainer]) -> LanguageModel:
    """Return the task of a config."""
    return language_model_of(config)(kind, read_spec)


def model_callbacks(config: TrainConfig, task: LanguageModel) -> list[Callback]:
    """List the callbacks of a language model's run."""
    exported: list[Callback] = [ExportHF()] if config.export_hf else []
    return [DataSummary(task), *run_callbacks(config, task, config.objective.callbacks(task)), *exported]


def run_callbacks(config: TrainConfig, task: Task, of_objective: Sequence[Callback] = ()) -> list[Callback]:
    """List the callbacks of any run."""
    first: list[Callback] = []
    last: list[Callback] = []
    for option in options_of(config):
        first += option.first_callbacks(config, task)
        last += option.callbacks(config, task)
    return [*first, *of_objective, Reporting(), BadSteps(), *last, BoundedMemory()]
