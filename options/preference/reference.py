"""Preferences in a run: what the reference model thinks of each answer, and the measures of each step.

The reference is the model with the weights that the run starts with (with `lora`: its base, or the adapter it starts
from). Before the first step a forward-only pass of the pipeline over all pairs, packed like training, gives the
log-probabilities of both answers of each; so no second model is held, and no step computes them again. They lie in a
file named by the pairs, the weights and the dtype: beside the tokenized records, for other runs, and in the run's
folder, for its later starts, whose weights are others.

KTO compares each answer with an estimate of the divergence from the reference: the mean, over the samples of the global
batch, of what log-probabilities of answers to other prompts (`options.preference.mismatch`) have gained, or 0 where
they have lost. The same pass gives them before each step, and the reference's once.

Cost: a third of an epoch, once; 8 bytes a pair. KTO: twice that, and a forward pass more in each step.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from tqdm import tqdm

from common import phases
from common.kept_arrays import KeptArray
from common.quantities import duration
from common.terminal import paused
from data.collation import Collation
from data.loader import GlobalBatch, Loader
from data.paths import digests_folder
from data.sample_set import KeptSamples, SampleSet
from data.tokenized.recipe import digest_of
from models.checkpoint.digest import model_digest
from models.checkpoint.layout import resolve
from models.checkpoint.publish import writing
from models.checkpoint.source import open_source
from options.preference.collation import judged
from options.preference.mismatch import Mismatched
from training.batches import build_loader
from training.callbacks import JobView
from training.config.keys import TrainConfig
from training.config.precision import training_dtype
from training.distributed.processes import agreed, from_first
from training.engine.trainer import Trainer
from training.errors import RunRefused
from training.measures import Measures, loss_of
from training.objective import ModelAndRecords

if TYPE_CHECKING:
    from options.preference.keys import PreferenceSection
    from training.loop import Run

FP32_ROUNDING, ROUNDING = 1e-3, 5e-2  # of log-probabilities, in another division of the model or by other kernels
# [samples, 2]: log-probabilities of the better and the worse answer; or of the only one, and of that to another prompt.
Sums = NDArray[numpy.float32]


class Preferences(Measures):
    """Give the loaders the reference's log-probabilities, and the metrics what is counted over pairs."""

    def __init__(self, model: ModelAndRecords, section: PreferenceSection, right: str) -> None:
        super().__init__(right)
        self._model, self._section = model, section
        self._missing: list[tuple[str, KeptSamples, Sequence[Loader]]] = []
        self._unproven: list[tuple[str, KeptSamples, Loader]] = []  # taken from an earlier run

    def on_build(self, job: JobView) -> None:
        if not self._section.needs_reference:
            return
        task, evaluation = self._model, self._model.evaluation
        self._missing = [("data", task.dataset, [task.loader])]
        if task.held_out is not None and evaluation:
            self._missing += [("evaluation data", task.held_out, list(evaluation.loaders.values()))]
        if self._section.unpaired:
            job.log.print(_balance(task.dataset, self._section))
        if self._section.loss == "kto":
            for what, dataset, loaders in self._missing:
                mismatched = mismatched_loader(dataset, job.config, what, partial(task.collation, job.config))
                for loader in loaders:
                    judged(loader).mismatched = mismatched
        self._start = from_first(partial(_digest_start, job.config, task))
        self._folder = job.save_path if job.disk.owns_folder else None
        for each in tuple(self._missing):
            what, dataset, loaders = each
            places = [self._place(folder, dataset, loaders) for folder in (job.save_path, dataset.folder)]
            known = from_first(partial(_read, places))
            if known is not None:
                self._missing.remove(each)
                self._use(known, dataset, loaders)
                if not job.progress.checkpoint:
                    self._unproven.append((what, dataset, loaders[0]))
                job.log.print(f"reference: log-probabilities of the {what} are known")
            elif job.progress.checkpoint:
                raise RunRefused(
                    f"reference: the {what} have to be compared with the weights that this run began with, and neither "
                    f"{' nor '.join(str(place.path) for place in places)} is there; expected one of them, or another "
                    "save_path"
                )

    def on_start(self, run: Run) -> None:
        for what, dataset, loader in self._unproven:
            whole = build_loader(dataset, run.config, collation=loader.collation)
            check_reference(run.trainer, whole, loader, what, training_dtype(run.config))
        for what, dataset, loaders in self._missing:
            phases.enter(f"reference: log-probabilities of the {what}")
            loader = build_loader(dataset, run.config, collation=loaders[0].collation)
            quiet = run.progress.log.quiet
            begin = time.monotonic()
            sums = log_probabilities(run.trainer, loader, run.mark, quiet)
            if (others := judged(loaders[0]).mismatched) is not None:
                sums[:, 1] = log_probabilities(run.trainer, others, run.mark, quiet)[:, 0]
            self._use(sums, dataset, loaders)
            took = duration(time.monotonic() - begin)
            run.progress.log.print(f"reference: log-probabilities of the {what} computed in {took}")
        if run.evaluation and judged(run.loader).mismatched:
            run.evaluation.before = estimate_kl

    @contextmanager
    def around_step(self, run: Run, step: int, batch: GlobalBatch) -> Iterator[None]:
        with run.trainer.timings("forward_backward"):
            estimate_kl(run.trainer, run.loader, batch)
        yield

    def _place(self, folder: Path, dataset: KeptSamples, loaders: Sequence[Loader]) -> KeptArray:
        """Name what is kept in a folder."""
        others = judged(loaders[0]).mismatched
        cut = [int(others.data.lengths.sum())] if others else []  # max_seq_len cuts more than in the samples
        made_of = [dataset.fingerprint(), self._start, *cut]
        name = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]
        return KeptArray(folder / f"reference-{name}.bin", made_of, "float32", (len(dataset), 2))

    def _use(self, sums: Sums, dataset: KeptSamples, loaders: Sequence[Loader]) -> None:
        """Give the loaders log-probabilities, and keep them for later starts; all ranks call it together."""
        for loader in loaders:
            known = judged(loader)
            known.reference = sums
            if known.mismatched:
                judged(known.mismatched).reference = sums[:, 1:]
        folders = [dataset.folder] if distributed.get_rank() == 0 else []
        with agreed():
            for folder in [*folders, *([self._folder] if self._folder else [])]:
                place = self._place(folder, dataset, loaders)
                if place.find() is None:  # missing, or damaged
                    with writing(folder):
                        place.write(sums)


def log_probabilities(
    trainer: Trainer, loader: Loader, mark: Callable[[str], None] = lambda _: None, quiet: bool = True
) -> Sums:
    """Compute the log-probabilities of all documents' trained tokens, without dropout; all ranks call it together.

    Of samples with one document the second number is 0.

    Args:
        loader: of all samples once.
        mark: reports progress to the failure detector.
        quiet: whether another rank shows progress.
    """
    sums = numpy.zeros((len(loader.data.lengths), 2), numpy.float32)
    hidden = True if quiet else None  # None: only on a terminal
    with paused(), tqdm(total=loader.steps_per_epoch, desc="reference", disable=hidden, leave=False) as bar:
        for step in range(loader.steps_per_epoch):
            numbers, found = _of_batch(trainer, loader, loader.batch(step))
            sums[numbers, : found.shape[1]] = found.cpu().numpy()
            bar.update()
            mark("a batch of the reference")
    whole = torch.from_numpy(sums).to(trainer.engine.device)
    distributed.all_reduce(whole)
    result: Sums = whole.cpu().numpy()
    return result


def _balance(data: KeptSamples, section: PreferenceSection) -> str:
    """Say how many answers of each class there are, and how they weigh against each other."""
    good = int(data.values.sum(dtype=numpy.float64))
    bad = len(data) - good
    weights = (section.desirable_weight or 1) * good, (section.undesirable_weight or 1) * bad
    ratio = f"{weights[0] / weights[1]:.2f}" if bad else "inf"
    return f"answers: {good:,} desirable, {bad:,} undesirable, weighted {ratio} to 1; KTO's authors advise 1 to 1.33"


def mismatched_loader(
    data: SampleSet, config: TrainConfig, what: str = "data", collate: Callable[[SampleSet], Collation] | None = None
) -> Loader:
    """Make the loader of the same samples with answers to other prompts, in rows that are long enough for them.

    Args:
        collate: returns what a loader has to know; as the objective says where absent.
    """
    others = Mismatched(data, config.max_seq_len, what)
    collation = (collate or config.objective.collation)(others)
    return build_loader(others, config.model_copy(update={"pack_len": None}), collation=collation)


def estimate_kl(trainer: Trainer, loader: Loader, batch: GlobalBatch) -> None:
    """Set what the rewards of a batch are compared with, where the loss is KTO's; all ranks call it together.

    It is the mean over the whole batch, or all of an evaluation, so that the loss does not depend on how it is divided.
    """
    if (others := judged(loader).mismatched) is None:
        return
    reference = judged(others).reference
    assert reference is not None
    numbers, found = _of_batch(trainer, others, others.batch_of(batch.samples))
    gained = found.double() - torch.from_numpy(reference[numbers]).to(found)
    total = gained.sum()
    distributed.all_reduce(total)
    loss_of(trainer).compare(total.item(), len(batch.samples))


def _of_batch(trainer: Trainer, loader: Loader, batch: GlobalBatch) -> tuple[list[int], Tensor]:
    """Compute the log-probabilities of a batch's documents; return those that no other rank returns.

    Returns:
        the numbers of samples, and [samples, documents of each].
    """
    loss = loss_of(trainer)
    loss.recorded = []
    trainer.eval_loss(loader, batch)
    found, loss.recorded = loss.recorded, None
    documents = 2 if loader.data.first.any() else 1
    if not found or trainer.groups.tensor.rank or trainer.groups.sequence.rank:  # others of a group compute the same
        return [], torch.empty(0, documents, device=trainer.engine.device)
    rows = chain(*batch.micro_batches[trainer.row_replica])
    return list(chain(*rows)), torch.cat(found).view(-1, documents)


def check_reference(trainer: Trainer, loader: Loader, known: Loader, what: str, dtype: torch.dtype) -> None:
    """Refuse kept log-probabilities that are not those of the weights that the run begins with.

    Before the first update the model is its own reference, so rewards and KTO's divergence are 0 but for rounding. A
    forward pass of the first batch shows it; all ranks call it together.

    Args:
        loader: of all samples once.
        known: has the kept ones.

    Raises:
        RunRefused: they are another model's.
    """
    given = judged(known)
    pairs = [(loader, given.reference)]
    if given.mismatched:
        pairs.append((given.mismatched, judged(given.mismatched).reference))
    for own, kept in pairs:
        assert kept is not None
        numbers, found = _of_batch(trainer, own, own.batch(0))
        expected = torch.from_numpy(kept[numbers, : found.shape[1]]).to(found)
        sums = torch.stack([(found - expected).abs().sum(), expected.abs().sum()]).double()
        distributed.all_reduce(sums)
        difference, size = sums.tolist()
        if difference > (FP32_ROUNDING if dtype is torch.float32 else ROUNDING) * size:
            raise RunRefused(
                f"reference: the kept log-probabilities of the {what} are not those of the weights that this run "
                f"begins with: {difference / size:.2%} off; expected another cache_dir and save_path"
            )


def _digest_start(config: TrainConfig, model: ModelAndRecords) -> list[Any]:
    """Digest what the start weights, and what is computed with them, depend on."""
    lora = config.lora
    weights = model_digest(open_source(model.model_folder, model.spec.base), digests_folder(config.cache_dir))
    given = [weights, str(training_dtype(config)), config.fp8.enabled, lora and lora.base]
    if lora and lora.start_from:
        folder = resolve(lora.start_from, adapter=True)
        given += [lora.alpha, lora.rslora, *lora.modules_to_save]
        given += [digest_of(file) for file in sorted(folder.iterdir()) if file.is_file()]
    return given


def _read(places: Sequence[KeptArray]) -> Sums | None:
    """Read log-probabilities from the first place that has them."""
    found = (place.find() for place in places)
    return next((numpy.array(sums) for sums in found if sums is not None), None)
