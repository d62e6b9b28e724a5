"""How far a run is when it starts, and what belongs to its end: the last checkpoint, and an export where asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from training.checkpoint.exporting import EXPORTED, export_run
from training.checkpoint.finding import find_checkpoint
from training.checkpoint.folder import RECORD, CheckpointRecord, DataOrder, finished, step_folder
from training.checkpoint.resume import check_resumable
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
        config: as the run's user has it.
        checkpoint: that the run goes on from; None to begin at step 1.
        known: what the checkpoint says of itself.
        order: of the data.
        total_steps: of the whole run.
        evaluate_first: whether the evaluation after the steps that are done is still due.
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
        """Look for a checkpoint, see that the run may go on from it, and say what changed.

        Args:
            check: raises a ConfigError where a checkpoint is that of another model.

        Raises:
            RunRefused: on every rank, where something differs that must agree.
        """
        check_samples(order.fingerprint, evaluation.records if evaluation else "none")
        total_steps = config.max_steps or config.n_epoches * steps_per_epoch
        checkpoint = find_checkpoint(config, Path(config.save_path), disk, log)
        known = CheckpointRecord.read(checkpoint) if checkpoint else None
        changes: list[str] = []
        with agreed():
            if checkpoint and known:
                check(checkpoint)
                changes = check_resumable(checkpoint, known, order, config)
        for line in changes:
            log.print(line)
        done, evaluated = (known.step, known.evaluated) if known else (0, False)
        due = evaluation is not None and evaluation.due(done, last=done == total_steps)
        return cls(config, log, checkpoint, known, order, total_steps, due and not evaluated)

    @property
    def done(self) -> int:
        """The last step that is done."""
        return self.known.step if self.known else 0

    def is_over(self, layers: Sequence[int], model_folder: Path) -> bool:
        """Whether nothing is left to do; says so, and makes up for what belongs to the end of a run; see `end`."""
        if not self.checkpoint or self.done < self.total_steps + self.evaluate_first:  # of the last step
            return False
        asking = "max_steps asks" if self.config.max_steps else "n_epoches ask"
        told = f"{self.checkpoint} has {self.done} steps done, and {asking} for {self.total_steps}"
        self.log.print(f"nothing to train: {told}")
        if self.done == self.total_steps:
            self._finish(self.checkpoint, layers, model_folder)
        return True

    def end(self, step: int, stop: StopRequest, layers: Sequence[int], model_folder: Path) -> None:
        """After `step`, the last of this start: leave where it is not that of the run, else see to the run's end.

        Args:
            layers: those that this rank's stage holds, to be exported.
            model_folder: the folder that the run started from.

        Raises:
            RunRefused: on every rank, where the last checkpoint could not be saved or exported.
        """
        saved = step_folder(Path(self.config.save_path), step)
        if self.checkpoint and self.done == step:  # which may lie elsewhere (`resume`)
            saved = self.checkpoint
        if step < self.total_steps:
            told = f"stopped after step {step} of {self.total_steps}"
            if step == self.done:
                told = f"stopped before step {step + 1} of {self.total_steps}: this start trained nothing"
            if all(gather((saved / RECORD).is_file())):
                self.log.print(f"{told}; the same command goes on from there: {saved}")
            else:
                newest = next(map(str, finished(Path(self.config.save_path))), "the beginning")
                unsaved = ", which could not be saved" if step > self.done else ""
                self.log.print(f"{told}{unsaved}; the same command goes on from {newest}")
            if stop.preempted and not self.log.quiet:
                requeue()
            sys.exit(stop.exit_code)
        self._finish(saved, layers, model_folder)

    def _finish(self, saved: Path, layers: Sequence[int], model_folder: Path) -> None:
        with agreed():
            if not (saved / RECORD).is_file():
                raise ConfigError(
                    f"save_path: the last checkpoint, {saved}, could not be saved; the same command tries again"
                )
        self.log.print(f"saved: {saved}")
        if self.config.export_hf:
            from training.model_card import write_card  # what draws takes two seconds

            target = Path(self.config.save_path) / EXPORTED
            export_run(saved, target, layers, model_folder, write_card)
            self.log.print(f"exported: {target}")
