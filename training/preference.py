"""Preferences in a run: what the reference model thinks of each answer, and the measures of each step.

The reference is the model with the weights that the run starts with (with `lora`: its base, or the adapter it starts
from). Before the first step a forward-only pass of the pipeline over all pairs, packed like training, gives the
log-probabilities of both answers of each; so no second model is held, and no step computes them again. They lie in a
file named by the pairs, the weights and the dtype: beside the tokenized records, for other runs, and in the run's
folder, for its later starts, whose weights are others.

Cost: a third of an epoch, once; 8 bytes a pair.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import distributed
from tqdm import tqdm

from common import phases
from common.quantities import duration
from common.terminal import paused
from common.whole_files import block_checksum, replacing
from data.loader import Loader
from data.tokenized.dataset import Dataset
from models.checkpoint.adapter import base_checksum
from models.checkpoint.layout import resolve
from models.checkpoint.publish import writing
from models.checkpoint.source import open_source
from training.callbacks import Callback
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.data_setup import build_loader
from training.distributed.processes import agreed
from training.engine.trainer import Trainer
from training.errors import RunRefused

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.job import Job
    from training.language_model import LanguageModel
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics

Value = TypeVar("Value")
Sums = NDArray[numpy.float32]  # [samples, 2]: log-probabilities of the better and the worse answer


class Preferences(Callback):
    """Give the loaders the reference's log-probabilities, and the metrics what is counted over pairs."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._missing: list[tuple[str, Dataset, Sequence[Loader]]] = []

    def on_build(self, job: Job) -> None:
        if not (job.config.preference and job.config.preference.needs_reference):
            return
        task, evaluation = self._model, job.task.evaluation
        self._missing = [("data", task.dataset, [task.loader])]
        if task.held_out is not None and evaluation:
            self._missing += [("evaluation data", task.held_out, list(evaluation.loaders.values()))]
        self._start = from_first(partial(_digest_start, job.config, task))
        self._folder = job.save_path if job.disk.owns_folder else None
        for each in tuple(self._missing):
            what, dataset, loaders = each
            places = [folder / self._name(dataset) for folder in (job.save_path, dataset.folder)]
            known = from_first(partial(_read, places, len(dataset)))
            if known is not None:
                self._missing.remove(each)
                self._use(known, dataset, loaders)
                job.log.print(f"reference: log-probabilities of the {what} are known")
            elif job.progress.checkpoint:
                raise RunRefused(
                    f"reference: the {what} have to be compared with the weights that this run began with, and neither "
                    f"{' nor '.join(map(str, places))} is there; expected one of them, or another save_path"
                )

    def on_start(self, run: Run) -> None:
        for what, dataset, loaders in self._missing:
            phases.enter(f"reference: log-probabilities of the {what}")
            loader, quiet = build_loader(dataset, run.config), run.progress.log.quiet
            begin = time.monotonic()
            self._use(log_probabilities(run.trainer, loader, run.mark, quiet), dataset, loaders)
            took = duration(time.monotonic() - begin)
            run.progress.log.print(f"reference: log-probabilities of the {what} computed in {took}")

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        metrics.measures |= measures_of(run.trainer)

    def on_evaluation(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        found = measures_of(run.trainer)
        right = found[loss_of(run.trainer).measures[0]]
        metrics |= {"eval_error": 1 - right} | {f"eval_{name}": value for name, value in found.items()}

    def _name(self, dataset: Dataset) -> str:
        key = hashlib.sha256(json.dumps([dataset.fingerprint(), self._start]).encode()).hexdigest()[:16]
        return f"reference-{key}.safetensors"

    def _use(self, sums: Sums, dataset: Dataset, loaders: Sequence[Loader]) -> None:
        """Give the loaders log-probabilities, and keep them for later starts; all ranks call it together."""
        for loader in loaders:
            loader.reference = sums
        folders = [dataset.folder] if distributed.get_rank() == 0 else []
        with agreed():
            for folder in [*folders, *([self._folder] if self._folder else [])]:
                path = folder / self._name(dataset)
                if _read([path], len(dataset)) is None:  # missing, or damaged
                    with writing(folder), replacing(path) as file:
                        file.write(save({"sums": sums}))


def log_probabilities(
    trainer: Trainer, loader: Loader, mark: Callable[[str], None] = lambda _: None, quiet: bool = True
) -> Sums:
    """Compute the log-probabilities of all documents' trained tokens, without dropout; all ranks call it together.

    Args:
        loader: of all samples once.
        mark: reports progress to the failure detector.
        quiet: whether another rank shows progress.
    """
    loss = loss_of(trainer)
    sums = numpy.zeros((len(loader.data.lengths), 2), numpy.float32)
    own = trainer.groups.tensor.rank == trainer.groups.sequence.rank == 0  # the others of a group compute the same
    hidden = True if quiet else None  # None: only on a terminal
    with paused(), tqdm(total=loader.steps_per_epoch, desc="reference", disable=hidden, leave=False) as bar:
        for step in range(loader.steps_per_epoch):
            batch, loss.recorded = loader.batch(step), []
            trainer.eval_loss(loader, batch)
            found, loss.recorded = loss.recorded, None
            if found and own:
                rows = [row for micro_batch in batch.micro_batches[trainer.row_replica] for row in micro_batch]
                numbers = [number for row in rows for number in row]
                sums[numbers] = torch.cat(found).view(-1, 2).cpu().numpy()
            bar.update()
            mark("a batch of the reference")
    whole = torch.from_numpy(sums).to(trainer.engine.device)
    distributed.all_reduce(whole)
    result: Sums = whole.cpu().numpy()
    return result


def loss_of(trainer: Trainer) -> Any:
    """Return the loss of a trainer's model: a `PreferenceLoss`, a `ScoreLoss` or a `DistillationLoss`."""
    return trainer.engine.module.micro_batch_loss


def measures_of(trainer: Trainer) -> dict[str, float]:
    """Average what the loss counted of pairs, documents or tokens since the last call; all ranks call it together."""
    loss = loss_of(trainer)
    totals = loss.take().to(trainer.engine.device)
    distributed.all_reduce(totals)  # ranks that share a row count it alike
    count, *sums = totals.tolist()
    found = {name: value / count for name, value in zip(loss.measures, sums, strict=True)}
    if "rewards/chosen" in found:
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


def _digest_start(config: TrainConfig, model: LanguageModel) -> str:
    """Digest what the start weights, and what is computed with them, depend on."""
    lora = config.lora
    given = [str(training_dtype(config)), config.fp8.enabled, lora and lora.base]
    if lora and lora.start_from:
        folder = resolve(lora.start_from, adapter=True)
        given.append(block_checksum(sorted(file for file in folder.iterdir() if file.is_file())))
    return json.dumps([base_checksum(open_source(model.model_folder, model.spec.base)), *given])


def _read(places: Sequence[Path], samples: int) -> Sums | None:
    """Read log-probabilities from the first file that is whole and of as many samples."""
    for path in places:
        with suppress(OSError, SafetensorError, KeyError):
            if (sums := load_file(path)["sums"]).shape == (samples, 2):
                return sums
    return None


def from_first(make: Callable[[], Value]) -> Value:
    """Return what rank 0 makes, on all ranks, which call it together."""
    made: list[Any] = [None]
    with agreed():
        if distributed.get_rank() == 0:
            made = [make()]
    distributed.broadcast_object_list(made)
    result: Value = made[0]
    return result
