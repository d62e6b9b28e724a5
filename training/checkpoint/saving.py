"""Saving a run: when, what, and what happens when it cannot be done.

A checkpoint folder is also a pipeline-layout folder: DeepSpeed writes one file a layer and the optimizer's shards;
config, tokenizer and manifest are laid beside them, so `pp_to_hg`, `demo.py` and `model_path` take the folder as it is.
Each rank adds its random states. Its record is written last and then `latest` moves; only then do old ones go. A save
that fails leaves the checkpoints before it as they are.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console

from models.checkpoint.convert import copy_side_files
from training.checkpoint import folder as checkpoint_folder
from training.checkpoint.deepspeed_files import CheckpointFiles
from training.checkpoint.folder import Best, CheckpointRecord, FileRecord, file_record, step_folder
from training.checkpoint.live_shards import slices_of
from training.config.keys import TrainConfig
from training.distributed.processes import gather
from training.engine.trainer import Trainer
from training.errors import ConfigError


def random_file(rank: int) -> str:
    """The name of a rank's random states."""
    return f"random-{rank:03d}.pt"


@dataclass
class Checkpointer:
    """Writes a run's checkpoints.

    Attributes:
        trainer: whose state is saved.
        save_path: the run's folder.
        side_files: config and tokenizer of the model (`read_side_files`); on rank 0.
        record: what is written of the run into each checkpoint, but for step and files.
        best: the checkpoint with the lowest evaluation loss, which is never removed.
        eval_records: the fingerprint of those it is measured on.
    """

    trainer: Trainer
    config: TrainConfig
    save_path: Path
    side_files: dict[str, bytes]
    record: CheckpointRecord
    log: Console
    best: Best | None = None
    eval_records: str = ""
    _files: CheckpointFiles = field(default_factory=CheckpointFiles)
    _last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        engine = self.trainer.engine
        engine.checkpoint_engine = self._files
        engine._copy_recovery_script = lambda *_: None  # pp_to_hg does what DeepSpeed's scripts are for

    def due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step`; of the minutes only this rank's clock is asked."""
        if self.config.save_interval and step % self.config.save_interval == 0:
            return True
        minutes = self.config.save_minutes
        return minutes is not None and time.monotonic() - self._last >= minutes * 60

    def is_best(self, eval_loss: float) -> bool:
        """Whether no checkpoint so far had a lower evaluation loss; what is no number never is the best."""
        return math.isfinite(eval_loss) and (self.best is None or eval_loss < self.best.eval_loss)

    def note(self, step: int, eval_loss: float) -> None:
        """Note the evaluation loss of a checkpoint that is there, if it is the best."""
        if not self.is_best(eval_loss):
            return
        name = step_folder(self.save_path, step).name
        self.best = Best(checkpoint=name, step=step, eval_loss=eval_loss, records=self.eval_records)
        if torch.distributed.get_rank() == 0:
            try:
                self.best.write(self.save_path)
            except OSError as error:
                self.log.print(f"warning: best.json could not be written: {_told(error)}")

    def save(self, step: int, eval_loss: float | None = None) -> None:
        """Save the state after `step`.

        Args:
            eval_loss: of the evaluation after that step, if there was one.

        Raises:
            ConfigError: it could not be written, and `on_save_error` says stop.
        """
        folder = step_folder(self.save_path, step)
        self.record = self.record.model_copy(update={"evaluated": eval_loss is not None})
        error = self._write(folder, step)
        self._last = time.monotonic()
        if error:
            message = f"{folder.name} could not be saved: {error}; the checkpoint before it stays the newest"
            if self.config.on_save_error == "stop":
                raise ConfigError(message)
            self.log.print(f"warning: {message}")
        elif eval_loss is not None:
            self.note(step, eval_loss)

    def _write(self, folder: Path, step: int) -> str | None:
        """Write a checkpoint; what went wrong, the same on every rank."""
        rank = torch.distributed.get_rank()
        error = None
        if rank == 0:
            try:
                if folder.exists():
                    checkpoint_folder.remove(folder)
                folder.mkdir(parents=True)
            except OSError as failure:
                error = _told(failure)
        if error := _first(gather(error)):
            return error
        self._save_state(folder)
        self._files.save(random_states(), str(folder / random_file(rank)))
        try:
            if not self._files.error:
                self.trainer.write_layers(folder)
                for name, content in self.side_files.items():
                    (folder / name).write_bytes(content)
        except OSError as failure:
            self._files.error = failure
        written = gather((_told(self._files.error) if self._files.error else None, self._files.written))
        error = _first([each for each, _ in written])
        if rank == 0:
            error = error or self._finish(
                folder, step, {name: file for _, files in written for name, file in files.items()}
            )
            if error:
                shutil.rmtree(folder, ignore_errors=True)
        return _first(gather(error))

    def _save_state(self, folder: Path) -> None:
        """DeepSpeed's part. Without ZeRO it numbers the weights and keeps no names, so they go along."""
        engine = self.trainer.engine
        sharded = engine.zero_optimization()
        names = {} if sharded else {"parameter_names": [piece.name for piece in slices_of(engine)]}
        engine.save_checkpoint(str(self.save_path), tag=folder.name, client_state=names, save_latest=False)

    def _finish(self, folder: Path, step: int, written: dict[str, FileRecord]) -> str | None:
        """Rank 0's part once all files are there."""
        try:
            present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
            files = {name: written.get(name) or file_record(path) for name, path in present.items()}
            self.record.model_copy(update={"step": step, "files": files}).write(folder)
            checkpoint_folder.point_latest(self.save_path, folder)
            checkpoint_folder.prune(
                self.save_path, self.config.keep_last, {self.best.checkpoint} if self.best else set()
            )
        except OSError as failure:
            return _told(failure)
        return None


def read_side_files(model_folder: Path) -> dict[str, bytes]:
    """What makes a folder of layer files complete, by name: read once, as the model may be gone when a run saves.

    Raises:
        CheckpointError: the folder is incomplete.
    """
    with TemporaryDirectory() as made:
        copy_side_files(model_folder, Path(made))
        return {path.name: path.read_bytes() for path in Path(made).iterdir()}


def random_states() -> dict[str, torch.Tensor]:
    """The generators that dropout draws from on this rank."""
    states = {"cpu": torch.get_rng_state()}
    if get_accelerator().device_name() != "cpu":
        states["device"] = get_accelerator().get_rng_state()
    return states


def restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Put the generators back to where `random_states` found them."""
    torch.set_rng_state(states["cpu"])
    if "device" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["device"])


def _told(error: OSError) -> str:
    return error.strerror or str(error)


def _first(errors: list[str | None]) -> str | None:
    return next((error for error in errors if error), None)
