"""Saving a run: when, what, and what happens when it cannot be done.

A checkpoint folder is also a pipeline-layout folder: DeepSpeed writes one file a layer and the optimizer's shards;
config, tokenizer and manifest are laid beside them, so `pp_to_hg`, `demo.py` and `model_path` take the folder as it is.
Each rank adds its random states. Its record is written last and then `latest` moves; only then do old ones go. A save
that fails leaves the checkpoints before it as they are.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console

from common.whole_files import replace_text, sync
from models.checkpoint.convert import copy_side_files
from models.checkpoint.layout import LATEST
from models.checkpoint.publish import sweep, workplace, writing
from models.errors import CheckpointError
from training.checkpoint.deepspeed_files import CheckpointFiles
from training.checkpoint.folder import BEST, Best, CheckpointRecord, FileRecord, prune, set_aside, step_folder
from training.checkpoint.resharding import slices_of
from training.config.keys import TrainConfig
from training.distributed.processes import agreed, gather
from training.engine.trainer import Trainer
from training.errors import ConfigError, RunRefused


def random_file(rank: int) -> str:
    """The name of the file with a rank's random states: the generators that dropout draws from."""
    return f"random-{rank:03d}.pt"


@dataclass
class Checkpointer:
    """Writes a run's checkpoints.

    Attributes:
        trainer: whose state is saved.
        save_path: the run's folder.
        side_files: config and tokenizer of the model (`read_side_files`); on rank 0.
        record: what each checkpoint's record says, but for what is that checkpoint's own.
        eval_records: the fingerprint of those that the evaluation loss is measured on; empty without evaluation.
        best: the checkpoint with the lowest evaluation loss, which is never removed.
        saved: the step of the last one that was written.
    """

    trainer: Trainer
    config: TrainConfig
    save_path: Path
    side_files: dict[str, bytes]
    record: CheckpointRecord
    log: Console
    eval_records: str = ""
    best: Best | None = field(init=False)
    saved: int = 0
    _files: CheckpointFiles = field(default_factory=CheckpointFiles)
    _last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        engine = self.trainer.engine
        engine.checkpoint_engine = self._files
        engine._copy_recovery_script = lambda *_: None  # pp_to_hg does what DeepSpeed's scripts are for
        with agreed():
            self.best = Best.read(self.save_path, self.record.step, self.eval_records)

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
                self.log.print(f"warning: {BEST} could not be written: {error.strerror or error}")

    def save(self, step: int, eval_loss: float | None = None) -> None:
        """Save the state after `step`, with the loss of the evaluation after it, if there was one.

        Raises:
            ConfigError: it could not be written, and `on_save_error` says stop.
        """
        folder = step_folder(self.save_path, step)
        try:
            self._write(folder, step, evaluated=eval_loss is not None)
        except RunRefused as refused:
            message = f"{folder.name} could not be saved: {refused}; the checkpoint before it stays the newest"
            if self.config.on_save_error == "stop":
                raise ConfigError(message) from None
            self.log.print(f"warning: {message}")
        else:
            self.saved = step
            if eval_loss is not None:
                self.note(step, eval_loss)
            if torch.distributed.get_rank() == 0:
                self._tidy_up()
        self._last = time.monotonic()

    def _write(self, folder: Path, step: int, evaluated: bool) -> None:
        """Write a checkpoint; RunRefused, on every rank, where that cannot be done on some."""
        engine, rank = self.trainer.engine, torch.distributed.get_rank()
        # Without ZeRO, DeepSpeed numbers the weights and keeps no names, so they go along.
        sharded = engine.zero_optimization()
        names = {} if sharded else {"parameter_names": [piece.name for piece in slices_of(engine)]}
        with ExitStack() as hidden:
            place = None
            with agreed(), writing(folder):
                if rank == 0:
                    sweep(self.save_path.glob(".step-*.partial-*"))
                    place = hidden.enter_context(workplace(folder))
            new = gather(place)[0]
            assert new is not None
            engine.save_checkpoint(str(new.parent), tag=new.name, client_state=names, save_latest=False)
            states = {"cpu": torch.get_rng_state(), "device": get_accelerator().get_rng_state()}
            self._files.save(states, str(new / random_file(rank)))
            self.trainer.write_layers(new, self._files.save)
            for name, content in self.side_files.items():
                self._files.write(new / name, methodcaller("write", content))
            written: dict[str, FileRecord] = {}
            with agreed(), writing(folder):
                written = self._files.written()
            files = {name: record for records in gather(written) for name, record in records.items()}
            with agreed(), writing(folder):
                if rank == 0:
                    own = {"step": step, "files": files, "evaluated": evaluated}
                    self.record.model_copy(update=own).write(new)
                    if folder.exists():
                        set_aside(folder)
                    new.rename(folder)
                    sync(self.save_path)  # which lists the checkpoint
                    replace_text(self.save_path / LATEST, folder.name)

    def _tidy_up(self) -> None:
        """Remove earlier checkpoints; the new one counts whether that works or not."""
        try:
            best = {self.best.checkpoint} if self.best else set()
            prune(self.save_path, self.config.keep_last, best)
        except (OSError, CheckpointError) as error:
            self.log.print(f"warning: an earlier checkpoint stays: {' '.join(str(error).split())}")


def read_side_files(model_folder: Path) -> dict[str, bytes]:
    """What makes a folder of layer files complete, by name: read once, as the model may be gone when a run saves.

    Raises:
        CheckpointError: the folder is incomplete.
    """
    with TemporaryDirectory() as made:
        copy_side_files(model_folder, Path(made))
        return {path.name: path.read_bytes() for path in Path(made).iterdir()}
