"""Save checkpoints of a run.

A checkpoint folder is also a model folder in the pipeline layout: DeepSpeed writes one file per layer and the
optimizer's shards, and config, tokenizer and manifest are added, so `pp_to_hg`, `demo.py` and `model_path` accept it.
Each rank adds its random states. The record is written last, then `latest` moves, and only then old checkpoints are
removed. A failed save leaves the earlier checkpoints as they are.

With `save_async` a save returns when its files are copied to host memory, and a thread writes them
(`training.checkpoint.deepspeed_files`). `settle` turns them into a checkpoint after a later step, when all ranks have
written theirs. Until then the one before is the newest.

If each host has its own disk, its folder has what its ranks need to resume. A host renames its folder when all hosts
have written their record, so if one folder is complete, all are, under their final or their temporary name
(`training.checkpoint.run_folder`).
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
from models.checkpoint.publish import hidden_folder, writing
from training.checkpoint.deepspeed_files import CheckpointFiles
from training.checkpoint.folder import BEST, Best, CheckpointRecord, FileRecord, set_aside, step_folder
from training.checkpoint.resharding import slices_of
from training.checkpoint.run_folder import best_so_far, name_latest, on_each_disk, sweep_partial, tidy_up
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import agreed, gather
from training.engine.trainer import Trainer
from training.errors import ConfigError, RunRefused


def random_file(rank: int) -> str:
    """Name the file with a rank's random states, from which dropout draws."""
    return f"random-{rank:03d}.pt"


@dataclass(frozen=True)
class PendingSave:
    """A save whose files are being written.

    Attributes:
        new: temporary folder, renamed to `folder` at the end.
        record: of the checkpoint, still without its files.
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
        trainer: has the state to save.
        save_path: the run's folder.
        disk: has the folder.
        side_files: file name -> content of config and tokenizer (`read_side_files`), on the rank that owns the folder.
        record: what the records of all checkpoints have in common.
        eval_records: fingerprint of the evaluation set; empty without evaluation.
        best: the best checkpoint by evaluation, which is never removed.
        saved: step of the last checkpoint written.
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
    _pending: PendingSave | None = field(default=None, init=False)
    _last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        engine = self.trainer.engine
        engine.checkpoint_engine = self._files = CheckpointFiles(background=self.config.save_async)
        engine._copy_recovery_script = lambda *_: None  # pp_to_hg replaces DeepSpeed's scripts
        own, disk = (self.trainer.stage, self.trainer.groups.tensor.rank), self.disk
        shares = gather(own)
        if own not in [shares[rank] for rank in disk.ranks[: disk.number]]:
            engine.save_non_zero_checkpoint = True  # files that a stage's replicas share are written once per disk
        self.best = best_so_far(self.save_path, self.record.step, self.eval_records)

    def due(self, step: int) -> bool:
        """Return whether the config asks for a checkpoint after `step`; for `save_minutes`, by this rank's clock."""
        if self.config.save_interval and step % self.config.save_interval == 0:
            return True
        minutes = self.config.save_minutes
        return minutes is not None and time.monotonic() - self._last >= minutes * 60

    def is_best(self, eval_loss: float) -> bool:
        """Return whether the loss is finite and below that of all checkpoints so far."""
        return math.isfinite(eval_loss) and (self.best is None or eval_loss < self.best.value)

    def note(self, step: int, eval_loss: float) -> None:
        """Record a saved checkpoint in best.json if its evaluation loss is the best."""
        if not self.is_best(eval_loss):
            return
        name = step_folder(self.save_path, step).name
        measure = self.config.objective.best_by
        self.best = Best(checkpoint=name, step=step, measure=measure, value=eval_loss, records=self.eval_records)
        on_each_disk(f"{BEST} could not be written", partial(self.best.write, self.save_path), self.disk, self.log)

    def save(self, step: int, eval_loss: float | None = None) -> None:
        """Save the state after `step`, with the loss of the evaluation after it, if there was one.

        Raises:
            ConfigError: this checkpoint or the one before could not be written, with `on_save_error: stop`.
        """
        self.settle()
        folder = step_folder(self.save_path, step)
        with self._report_failure(folder):
            self._pending = self._begin(folder, step, eval_loss)
        if not self.config.save_async:
            self.settle()
        self._last = time.monotonic()

    def settle_if_written(self) -> None:
        """Call `settle` if no rank is still writing; all ranks call it after each step."""
        if self._pending and all(gather(self._files.done)):
            self.settle()

    def settle(self) -> None:
        """Wait for the pending save's files, if any, and make them the newest checkpoint."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._report_failure(pending.folder):
            self._finish(pending)
            self.saved = pending.record.step
            on_each_disk(f"{LATEST} could not be written", partial(name_latest, pending.folder), self.disk, self.log)
            if pending.eval_loss is not None:
                self.note(self.saved, pending.eval_loss)
            tidy_up(self.save_path, self.config.keep_last, self.best, self.disk, self.log)

    @contextmanager
    def _report_failure(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except RunRefused as refused:
            message = f"{folder.name} could not be saved: {refused}; the checkpoint before it stays the newest"
            if self.config.on_save_error == "stop":
                raise ConfigError(message) from None
            self.log.print(f"warning: {message}")

    def _begin(self, folder: Path, step: int, eval_loss: float | None) -> PendingSave:
        """Write a checkpoint's files, or start to; RunRefused, on every rank, if a folder cannot be created."""
        engine, rank = self.trainer.engine, torch.distributed.get_rank()
        # Without ZeRO, DeepSpeed saves numbers alone, so add the names of the weights, and which pieces they are of.
        sharded = engine.zero_optimization()
        kept = slices_of(engine)
        pieces = {"parameter_names": [piece.name for piece in kept], "pieces": [(p.offset, p.numel) for p in kept]}
        self._files.offsets = {piece.name: piece.offset for piece in kept}

        with ExitStack() as hidden:
            made = None
            with agreed(), writing(folder):
                if self.disk.owns_folder:
                    sweep_partial(self.save_path)
                    made = hidden.enter_context(hidden_folder(folder))
            new = gather(made)[self.disk.ranks[0]]
            assert new is not None

            engine.save_checkpoint(
                str(new.parent), tag=new.name, client_state={} if sharded else pieces, save_latest=False
            )

            states = {"cpu": torch.get_rng_state(), "device": get_accelerator().get_rng_state()}
            self._files.save(states, str(new / random_file(rank)))
            self.trainer.write_layers(new, self._files.save, self.disk)
            for name, content in self.side_files.items():
                self._files.write(new / name, methodcaller("write", content))
            self._files.close()

            own = {"step": step, "evaluated": eval_loss is not None}
            record = self.record.model_copy(update=own, deep=True)  # a stream's record grows with the run
            return PendingSave(folder, new, record, eval_loss, hidden.pop_all())

    def _finish(self, pending: PendingSave) -> None:
        """Turn the written files into a checkpoint; RunRefused, on every rank, if some rank cannot."""
        folder, new = pending.folder, pending.new
        with pending.hidden:
            written: dict[str, FileRecord] = {}
            with agreed(), writing(folder):
                written = self._files.wait()
            hosts: dict[str, dict[str, FileRecord]] = defaultdict(dict)
            for host, records in gather((self.disk.host, written)):
                hosts[host] |= records
            files = {"hosts": dict(hosts), "host": self.disk.host} if self.disk.host else {"files": hosts[""]}
            with agreed(), writing(folder):
                if self.disk.owns_folder:
                    pending.record.model_copy(update=files).write(new)
            with agreed(), writing(folder):
                if self.disk.owns_folder:
                    if folder.exists():
                        set_aside(folder)
                    new.rename(folder)
                    sync(self.save_path)  # makes the new name durable
