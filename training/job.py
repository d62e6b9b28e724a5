"""The whole job of one rank, whatever it trains: read, resume, build, train, finish.

A `Task` is what is trained and on what: a language model on records (`training.language_model`), or a script's layers
on its samples (`options.any_layers.task`). Everything optional is a callback (`training.callbacks`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console

from common import phases
from common.log import Log
from data.loader import Loader
from models.spec import ModelSpec
from training.callbacks import Callback, Choice, within
from training.checkpoint.folder import CheckpointRecord, DataOrder
from training.checkpoint.resume import resume
from training.checkpoint.run_folder import best_so_far, make_room
from training.checkpoint.saving import Checkpointer
from training.config.changes import settings_of
from training.config.deepspeed_keys import describe_ignored_keys
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import ProcessInfo, agreed
from training.distributed.signals import StopRequest
from training.engine.numerics import describe_numerics, set_numerics
from training.engine.trainer import Trainer
from training.evaluation import Evaluation
from training.loop import Run, run_steps
from training.optimizer.lr_schedules import LearningRate
from training.preflight import check_folder, check_setup, check_writable
from training.progress import Progress
from training.topology import Division


class Task(ABC):
    """What a job trains, and on what. `read` comes first; the rest may rely on what it read.

    Attributes:
        in_stages: whether the layers are divided into pipeline stages.
        model_folder: where the weights to begin with come from; None for a script's layers.
        spec: of a language model.
        n_layers: of the whole model.
        loader: of the samples to train on.
        evaluation: on the samples to evaluate on, if any.
        order: decides which samples a step sees.
        side_files: config and tokenizer of a checkpoint by file name, on the rank that owns the run's folder.
    """

    in_stages: bool = True
    model_folder: Path | None = None
    spec: ModelSpec | None = None
    n_layers: int
    loader: Loader
    evaluation: Evaluation | None
    order: DataOrder
    side_files: dict[str, bytes]

    @abstractmethod
    def read(self, config: TrainConfig, disk: Disk, log: Console) -> None:
        """Read and check the inputs; nothing is communicated.

        Raises:
            ConfigError, DataError, CheckpointError: an input is unusable.
        """

    @abstractmethod
    def check_checkpoint(self, folder: Path) -> None:
        """Check that a checkpoint is one of this model and, where the record cannot tell, of this data.

        Raises:
            ConfigError: it is another's.
        """

    def make_batches(self, config: TrainConfig) -> None:  # noqa: B027 (a script's layers have no key that is `auto`)
        """Divide the samples into batches anew, by keys that a callback has chosen."""

    @abstractmethod
    def divide(self, config: TrainConfig) -> Division:
        """Divide the layers among the stages as the config says, or evenly where it leaves that open."""

    @abstractmethod
    def build(self, job: Job) -> Trainer:
        """Build this rank's share of the model, with the weights of `job.progress.checkpoint` if there is one."""

    @abstractmethod
    def origin(self, sample: int) -> str:
        """Name the source file and record of a sample."""

    @abstractmethod
    def describe_model(self, job: Job) -> list[str]:
        """Describe the model and how it is divided, in lines for the log."""

    @abstractmethod
    def describe_data(self, job: Job) -> None:
        """Log what is trained on, and for how many steps."""

    def check_weights(self, job: Job) -> None:  # noqa: B027 (few tasks need it)
        """Check that every host has the same weights to begin with; all ranks call it together."""

    def begin(self, job: Job) -> None:  # noqa: B027
        """Prepare this process, and the samples of the first step."""

    def close(self) -> None:  # noqa: B027
        """Release what `begin` started."""


class Monitor(Protocol):
    """Watches over a rank's job, and holds the folder of its run (`training.distributed.rank_monitor`)."""

    def hold(self, folder: Path, disk: Disk) -> None:
        """Take the folder until the end of the run; raise a ConfigError where another run has it."""

    def mark(self, what: str) -> None:
        """Note progress; raise a ConfigError where another run has taken over the folder."""

    def expect_no_marks(self) -> None:
        """Expect no further mark."""


class Job:
    """One rank's job.

    Attributes:
        config: the user's; from the building of the model on, with `auto` values resolved.
        progress: where the run begins and ends.
        division: the layers of each stage, and those that recompute.
        report: lines for the log, about model and choices.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        process: ProcessInfo,
        monitor: Monitor,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.task = task
        self.config = config
        self.process = process
        self.monitor, self.mark = monitor, monitor.mark
        self.callbacks = tuple(callbacks)
        self.log = Log(quiet=process.rank > 0, highlight=False)
        self.save_path = Path(config.save_path)
        self.stage = config.model_topo.stage_of(process.rank)
        self.report: list[str] = []
        self.disk: Disk
        self.progress: Progress
        self.division: Division

    @property
    def layers(self) -> list[int]:
        """The layers that this rank's stage holds."""
        return self.division.topology.layers(self.stage, self.task.n_layers)

    @property
    def model_folder(self) -> Path | None:
        """Where the weights to begin with come from."""
        return self.task.model_folder

    @property
    def eval_records(self) -> str:
        """The fingerprint of the records to evaluate on; empty without."""
        return self.task.evaluation.records if self.task.evaluation else ""

    def read(self) -> None:
        """Read the inputs, once the hosts agree, and take the run's folder.

        Raises:
            RunRefused: on every rank, where hosts differ, or one cannot read something.
        """
        phases.enter("reading the data")
        check_setup(self.config, self.log)
        self.disk = Disk.of(self.config.storage, self.process, self.config.model_topo)
        with agreed():
            if self.disk.owns_folder:
                check_writable("save_path", self.save_path)
            if self.process.rank == 0:
                self.config.check_packages()
            self.task.read(self.config, self.disk, self.log)
        check_folder(self.save_path, self.disk, self.log)
        with agreed():
            self.monitor.hold(self.save_path, self.disk)

    def divide(self) -> None:
        """Divide the layers; callbacks resolve what is `auto`."""
        self.division = self.task.divide(self.config)
        for callback in self.callbacks:
            for choice in callback.on_divide(self) or ():
                self._take(choice)
                if choice.keys:  # a checkpoint keeps them, as they decide what is computed
                    self.progress = replace(self.progress, config=self.config)
                    self.task.make_batches(self.config)

    def _take(self, choice: Choice) -> None:
        """Let what a callback chose take effect."""
        self.config = self.config.model_copy(update=dict(choice.keys))
        self.division = choice.division or self.division
        self.report += choice.report

    def run(self) -> bool:
        """Train, from the beginning or from the newest checkpoint; return whether the processes are to start over."""
        config, task, log = self.config, self.task, self.log
        stop = StopRequest(config.preemption_signals)
        self.read()
        self.progress = progress = Progress.find(
            config, self.disk, log, task.order, task.loader.steps_per_epoch, task.evaluation, task.check_checkpoint
        )

        task.check_weights(self)
        self.divide()
        if progress.is_over():
            if progress.done == progress.total_steps:
                self._finish()
            return False

        best = best_so_far(self.save_path, progress.done, self.eval_records)
        make_room(self.save_path, config.keep_last, best, self.disk, log)
        with agreed():
            task.begin(self)
        if progress.done < progress.total_steps and stop.agreed(False)[0]:  # loading weights may take minutes
            progress.leave(progress.done, stop)

        set_numerics(config)
        for callback in self.callbacks:
            for choice in callback.on_build(self) or ():
                self._take(choice)
        lines = [*task.describe_model(self), *self.division.report, *self.report]
        for line in [*lines, *describe_ignored_keys(config, task.in_stages), *describe_numerics(config)]:
            log.print(line)
        task.describe_data(self)

        self.config = self.config.with_parts(self.division.topology.parts)
        with within(callback.around(self) for callback in self.callbacks):
            phases.enter("building the model and loading its weights")
            run = self._build(stop)
            for callback in self.callbacks:
                callback.on_start(run)
            done = run_steps(run)

        if run.restart and done < progress.total_steps and not stop.agreed(False)[0]:
            log.print(f"{run.restart}: after step {done} of {progress.total_steps} the same command starts over")
            return True

        self.monitor.expect_no_marks()  # an export takes as long as the model is large
        if done < progress.total_steps:
            progress.leave(done, stop)
        self._finish()
        task.close()
        return False

    def _build(self, stop: StopRequest) -> Run:
        """Build the model and its engine, load weights and states, and assemble the run."""
        config, progress, task, log = self.config, self.progress, self.task, self.log
        topology = self.division.topology
        build = partial(task.build, self)
        trainer = resume(progress.checkpoint, progress.known, topology, config, build, log, task.spec)
        record = CheckpointRecord(
            step=progress.done, topology=topology, data=progress.order, settings=settings_of(progress.config)
        )

        checkpointer = Checkpointer(
            trainer, config, self.save_path, self.disk, task.side_files, record, log, self.eval_records
        )
        return Run(
            config=config,
            progress=progress,
            topology=topology,
            trainer=trainer,
            loader=task.loader,
            checkpointer=checkpointer,
            learning_rate=LearningRate(trainer.engine.basic_optimizer, config.scheduler, progress.total_steps),
            callbacks=self.callbacks,
            stop=stop,
            mark=self.mark,
            origin=task.origin,
            evaluation=task.evaluation,
        )

    def _finish(self) -> None:
        """Check that the last checkpoint of the whole run is there, and let callbacks use it."""
        checkpoint = self.progress.last_checkpoint()
        self.log.print(f"saved: {checkpoint}")
        for callback in self.callbacks:
            callback.on_finish(self, checkpoint)
