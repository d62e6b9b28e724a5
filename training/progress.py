"""Where a run begins and ends: the checkpoint to resume, the steps left, the last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from training.checkpoint.folder import RECORD, CheckpointRecord, DataOrder, finished, step_folder
from training.checkpoint.resume import check_resumable
from training.checkpoint.run_folder import find_checkpoint
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.distributed.signals import StopRequest
from training.errors import ConfigError
from training.evaluation import Evaluation
from training.launch.slurm import requeue
from training.preflight import check_samples


@dataclass(frozen=True)
class Progress:
    """Where a run begins and where it ends. All ranks make it and call its methods together.

    Attributes:
        config: the user's, before `auto` values are resolved.
        checkpoint: folder to resume from; None to begin at step 1.
        known: record of the checkpoint.
        order: decides which samples a step sees.
        total_steps: of the whole run.
        evaluate_first: whether the evaluation after the checkpoint's step is still due.
    """

    config: TrainConfig
    log: Console
    checkpoint: Path | None
    known: CheckpointRecord | None
    order: DataOrder
    total_steps: int
    evaluate_first: bool

    @classmethod
    def find(
        cls,
        config: TrainConfig,
        disk: Disk,
        log: Console,
        order: DataOrder,
        steps_per_epoch: int,
        evaluation: Evaluation | None,
        check: Callable[[Path], object],
    ) -> Progress:
        """Find the checkpoint to resume from, check that the config fits it, and log what changed.

        Args:
            check: raises a ConfigError for a checkpoint of another model.

        Raises:
            RunRefused: on every rank, if something differs that must not.
        """
        check_samples(order.fingerprint, evaluation.records if evaluation else "none")
        total_steps = config.max_steps or config.n_epoches * steps_per_epoch
        checkpoint = find_checkpoint(config, Path(config.save_path), disk, log)
        known = CheckpointRecord.read(checkpoint) if checkpoint else None
        changes: list[str] = []
        with agreed():
            if checkpoint and known:
                changes = check_resumable(checkpoint, known, order, config, check)
        for line in changes:
            log.print(line)
        done, evaluated = (known.step, known.evaluated) if known else (0, False)
        due = evaluation is not None and evaluation.due(done, last=done == total_steps)
        return cls(config, log, checkpoint, known, order, total_steps, due and not evaluated)

    @property
    def done(self) -> int:
        """The last completed step."""
        return self.known.step if self.known else 0

    def is_over(self) -> bool:
        """Return whether nothing is left to do; then log it."""
        if not self.checkpoint or self.done < self.total_steps + self.evaluate_first:
            return False
        asking = "max_steps asks" if self.config.max_steps else "n_epoches ask"
        found = f"{self.checkpoint} has {self.done} steps done, and {asking} for {self.total_steps}"
        self.log.print(f"nothing to train: {found}")
        return True

    def leave(self, step: int, stop: StopRequest) -> NoReturn:
        """Exit after `step`, as the run was asked to stop; all ranks call it together."""
        saved = self._folder(step)
        stopped = f"stopped after step {step} of {self.total_steps}"
        if step == self.done:
            stopped = f"stopped before step {step + 1} of {self.total_steps}: this start trained nothing"
        if all(gather((saved / RECORD).is_file())):
            self.log.print(f"{stopped}; the same command goes on from there: {saved}")
        else:
            newest = next(map(str, finished(Path(self.config.save_path))), "the beginning")
            unsaved = ", which could not be saved" if step > self.done else ""
            self.log.print(f"{stopped}{unsaved}; the same command goes on from {newest}")
        if stop.preempted and not self.log.quiet:
            requeue()
        sys.exit(stop.exit_code)

    def last_checkpoint(self) -> Path:
        """Return the checkpoint of the run's last step.

        Raises:
            RunRefused: on every rank, if it could not be saved.
        """
        saved = self._folder(self.total_steps)
        with agreed():
            if not (saved / RECORD).is_file():
                raise ConfigError(
                    f"save_path: the last checkpoint, {saved}, could not be saved; the same command tries again"
                )
        return saved

    def _folder(self, step: int) -> Path:
        """Return the checkpoint folder of a step; the one resumed from may lie elsewhere (`resume`)."""
        if self.checkpoint and self.done == step:
            return self.checkpoint
        return step_folder(Path(self.config.save_path), step)
