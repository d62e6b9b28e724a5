"""Saving a run: when, what, and what happens when it cannot be done.

A checkpoint folder is also a pipeline-layout folder: DeepSpeed writes one file a layer and the optimizer's shards;
config, tokenizer and manifest are laid beside them, so `pp_to_hg`, `demo.py` and `model_path` take the folder as it is.
Each rank adds its random states. Its record is written last and then `latest` moves; only then do old ones go. A save
that fails leaves the checkpoints before it as they are.

With `save_async` a save ends when its files are copied to host memory, and a thread writes them
(`training.checkpoint.deepspeed_files`). What makes them a checkpoint needs all ranks and comes after a later step, when
all have written theirs: `settle`. Until then the one before is the newest.

Where each host has its own disk, there is a folder on each, with what the host's ranks need to go on. A host renames
its folder when all have their record on the disk, so whoever has a folder knows that the others have one under one name
or the other (`training.checkpoint.finding`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console

from common.whole_files import sync
from models.checkpoint.layout import LATEST
from models.checkpoint.publish import workplace, writing
from training.checkpoint.deepspeed_files import CheckpointFiles
from training.checkpoint.folder import BEST, Best, CheckpointRecord, FileRecord, set_aside, step_folder
from training.checkpoint.resharding import slices_of
from training.checkpoint.tidying import best_so_far, name_latest, on_each_disk, sweep_partial, tidy_up
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.engine.trainer import Trainer
from training.errors import ConfigError, RunRefused


def random_file(rank: int) -> str:
    """The name of the file with a rank's random states: the generators that dropout draws from."""
    return f"random-{rank:03d}.pt"


@dataclass(frozen=True)
class UnderWay:
    """A save whose files are given to be written.

    Attributes:
        new: where they lie until they are the checkpoint `folder`.
        record: but for what is written.
        hidden: removes what is left of `new`.
    """

    folder: Path
    new: Path
    record: CheckpointRecord
    eval_loss: float | None
    hidden: ExitStack


@dataclass
class Checkpointer:
    """Writes a run's checkpoints.

    Attributes:
        trainer: whose state is saved.
        save_path: the run's folder.
        disk: on which the folder lies.
        side_files: config and tokenizer of the model (`read_side_files`), on the rank that keeps the folder.
        record: what each checkpoint's record says, but for what is that checkpoint's own.
        eval_records: the fingerprint of those that the evaluation loss is measured on; empty without evaluation.
        best: the checkpoint with the lowest evaluation loss, which is never removed.
        saved: the step of the last one that was written.
    """

    trainer: Trainer
    config: TrainConfig
    save_path: Path
    disk: Disk
    side_files: dict[str, bytes]
    record: CheckpointRecord
    log: Console
    eval_records: str = ""
    best: Best | None = field(init=False)
    saved: int = 0
    _files: CheckpointFiles = field(init=False)
    _under_way: UnderWay | None = field(default=None, init=False)
    _last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        engine = self.trainer.engine
        engine.checkpoint_engine = self._files = CheckpointFiles(background=self.config.save_async)
        engine._copy_recovery_script = lambda *_: None  # pp_to_hg does what DeepSpeed's scripts are for
        own, disk = (self.trainer.stage, self.trainer.sharing.tensor.rank), self.disk
        held = gather(own)
        if own not in [held[rank] for rank in disk.ranks[: disk.number]]:
            engine.save_non_zero_checkpoint = True  # what a stage's replicas have in common is written once a disk
        self.best = best_so_far(self.save_path, self.record.step, self.eval_records)

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
        on_each_disk(f"{BEST} could not be written", partial(self.best.write, self.save_path), self.disk, self.log)

    def save(self, step: int, eval_loss: float | None = None) -> None:
        """Save the state after `step`, with the loss of the evaluation after it, if there was one.

        Raises:
            ConfigError: it, or the one before, could not be written, and `on_save_error` says stop.
        """
        self.settle()
        folder = step_folder(self.save_path, step)
        with self._failure_told(folder):
            self._under_way = self._begin(folder, step, eval_loss)
        if not self.config.save_async:
            self.settle()
        self._last = time.monotonic()

    def settle_if_written(self) -> None:
        """`settle`, where no rank is still writing; all ranks call it after each step."""
        if self._under_way and all(gather(self._files.done)):
            self.settle()

    def settle(self) -> None:
        """Wait for the files of the save under way, if there is one, and make them the newest checkpoint.

        Raises:
            ConfigError: as `save`.
        """
        saving, self._under_way = self._under_way, None
        if saving is None:
            return
        with self._failure_told(saving.folder):
            self._finish(saving)
            self.saved = saving.record.step
            on_each_disk(f"{LATEST} could not be written", partial(name_latest, saving.folder), self.disk, self.log)
            if saving.eval_loss is not None:
                self.note(self.saved, saving.eval_loss)
            tidy_up(self.save_path, self.config.keep_last, self.best, self.disk, self.log)

    @contextmanager
    def _failure_told(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except RunRefused as refused:
            message = f"{folder.name} could not be saved: {refused}; the checkpoint before it stays the newest"
            if self.config.on_save_error == "stop":
                raise ConfigError(message) from None
            self.log.print(f"warning: {message}")

    def _begin(self, folder: Path, step: int, eval_loss: float | None) -> UnderWay:
        """Write a checkpoint's files, or have them written; RunRefused, on every rank, where some have no place."""
        engine, rank = self.trainer.engine, torch.distributed.get_rank()
        # Without ZeRO, DeepSpeed numbers the weights and keeps no names, so they go along.
        sharded = engine.zero_optimization()
        kept = slices_of(engine)
        names = {} if sharded else {"parameter_names": [piece.name for piece in kept]}
        self._files.offsets = {piece.name: piece.offset for piece in kept}
        with ExitStack() as hidden:
            place = None
            with agreed(), writing(folder):
                if self.disk.keeps:
                    sweep_partial(self.save_path)
                    place = hidden.enter_context(workplace(folder))
            new = gather(place)[self.disk.ranks[0]]
            assert new is not None
            engine.save_checkpoint(str(new.parent), tag=new.name, client_state=names, save_latest=False)
            states = {"cpu": torch.get_rng_state(), "device": get_accelerator().get_rng_state()}
            self._files.save(states, str(new / random_file(rank)))
            self.trainer.write_layers(new, self._files.save, self.disk)
            for name, content in self.side_files.items():
                self._files.write(new / name, methodcaller("write", content))
            self._files.close()
            told = {"step": step, "evaluated": eval_loss is not None}
            record = self.record.model_copy(update=told, deep=True)  # of a stream it grows with the run
            return UnderWay(folder, new, record, eval_loss, hidden.pop_all())

    def _finish(self, saving: UnderWay) -> None:
        """Make what is written a checkpoint; RunRefused, on every rank, where that cannot be done on some."""
        folder, new, keeps = saving.folder, saving.new, self.disk.keeps
        with saving.hidden:
            written: dict[str, FileRecord] = {}
            with agreed(), writing(folder):
                written = self._files.written()
            hosts: dict[str, dict[str, FileRecord]] = defaultdict(dict)
            for host, records in gather((self.disk.host, written)):
                hosts[host] |= records
            files = {"hosts": dict(hosts), "host": self.disk.host} if self.disk.host else {"files": hosts[""]}
            with agreed(), writing(folder):
                if keeps:
                    saving.record.model_copy(update=files).write(new)
            with agreed(), writing(folder):
                if keeps:
                    if folder.exists():
                        set_aside(folder)
                    new.rename(folder)
                    sync(self.save_path)  # which lists the checkpoint
