"""Distillation in a run: what the teacher finds of each trained token, and the measures of each step.

Before the student is built, the teacher takes its place: in the same stages, frozen, without an optimizer's state. A
forward-only pass over all samples, packed like training, gives the log-probabilities of each trained token's `top_k`
most probable words, and the teacher leaves the memory. They lie in a file beside the tokenized records, named by
records, teacher, dtype and `top_k`, for all later starts and runs, whose temperature and weight may differ: int32
[trained tokens, 2, top_k], sample by sample, words and the bits of their fp32 log-probabilities. On each host one rank
writes the file, and the stage with the loss maps it.

Cost: a third of an epoch of the teacher, once; 8 x `top_k` bytes of disk a trained token, and none of memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy
import torch
from numpy.typing import NDArray
from torch import distributed
from tqdm import tqdm

from common import phases
from common.kept_arrays import KeptArray
from common.lease import Held, Lease
from common.quantities import duration, gigabytes
from common.terminal import paused
from data.paths import digests_folder
from models.attention.kernels import choose_attention
from models.checkpoint.digest import model_digest
from models.checkpoint.publish import writing
from models.checkpoint.source import open_source
from options.distillation.collation import taught
from options.distillation.loss import TeacherWords
from options.distillation.teacher import TEACHER, config_of_teacher, frozen, shared_words
from options.planner.resources import check_resources
from training.batches import build_loader
from training.callbacks import Callback, JobView
from training.config.precision import training_dtype
from training.distributed.processes import agreed, from_first, gather
from training.engine.building import for_a_while
from training.engine.trainer import Trainer
from training.errors import ConfigError
from training.measures import measures_of
from training.objective import ModelAndRecords
from training.unplanned import split_as_configured

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from models.spec import ModelSpec
    from options.distillation.keys import DistillationSection
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics


class Teaching(Callback):
    """Give the loader what the teacher finds, computed where no earlier start has done so; add measures."""

    def __init__(self, model: ModelAndRecords, section: DistillationSection) -> None:
        self._model, self._section = model, section

    @property
    def _teacher(self) -> tuple[Path, ModelSpec]:
        return self._model.other_models[TEACHER]

    def on_build(self, job: JobView) -> None:
        task, given = self._model, self._section
        folder, spec = self._teacher
        limit = shared_words(task.spec, spec)
        notes = digests_folder(job.config.cache_dir)
        digest = from_first(lambda: model_digest(open_source(folder, spec), notes))
        made_of = [task.dataset.fingerprint(), digest, str(training_dtype(job.config)), given.top_k, limit]
        name = f"teacher-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]}.bin"
        shape = (int(taught(task.loader).first_tokens[-1]), 2, given.top_k)
        place = KeptArray(task.dataset.folder / name, made_of, "int32", shape)

        with self._alone(job, place) as known:
            if known:
                job.log.print("teacher: log-probabilities of the data are known")
            else:
                if job.progress.checkpoint:
                    job.log.print(
                        "teacher: nothing is kept of it (another than before, or an emptied cache): it is asked anew"
                    )
                self._compute(job, TeacherWords(given.top_k, limit), place)
        if task.spec.n_layers - 1 in job.layers:
            taught(task.loader).known = place.map()

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        metrics.measures |= measures_of(run.trainer)

    @contextmanager
    def _alone(self, job: JobView, place: KeptArray) -> Iterator[bool]:
        """Say whether the file is on every host's disk; if not, let no other run ask the same teacher meanwhile.

        All ranks call it together. One rank of each host looks at its disk; rank 0 has the lease.
        """
        looks = job.process.local_rank == 0  # another host may have another disk
        lease, held = Lease(place.path.parent, f"{place.path.name}.lease", lambda _: None), False
        told: set[str] = set()

        def wait(other: Held) -> None:
            if other.holder and other.holder.name not in told:
                told.add(other.holder.name)
                job.log.print(f"teacher: {other.holder.name} asks it about these records; waiting for it")

        try:
            with agreed(), writing(place.path.parent):
                if job.process.rank == 0:
                    held = lease.take_or_find(place.find, wait) is None
                    known = not held
                else:
                    known = not looks or place.find() is not None
            yield all(gather(known))
        finally:
            if held:
                place.sweep()
                lease.release()

    def _compute(self, job: JobView, words: TeacherWords, place: KeptArray) -> None:
        """Load the teacher, write the file, and free the teacher; all ranks call it together."""
        (folder, teacher), begin = self._teacher, time.monotonic()
        phases.enter(f"teacher: log-probabilities of the data by {folder}")
        config, spec = config_of_teacher(job.config), frozen(teacher)
        spec.set_attention(choose_attention(bool(config.use_flash_attn), training_dtype(config), spec.attention)[0])
        division = split_as_configured(config, spec, self._model.in_stages)
        check_resources(config, spec, division.topology.layers(job.stage, spec.n_layers), job.disk)
        writes = job.process.local_rank == 0  # another host may have another disk
        with agreed():
            folder_of_file, size = place.path.parent, place.n_bytes
            free = shutil.disk_usage(folder_of_file).free
            if writes and free < size:
                raise ConfigError(
                    f"distillation.top_k: {gigabytes(size)} of log-probabilities do not fit into the {gigabytes(free)} "
                    f"that are free in {folder_of_file}; expected a smaller top_k, or another cache_dir"
                )
        try:
            with (
                for_a_while(partial(self._model.kind.build, config, spec, folder, division)) as trainer,
                writing(folder_of_file),
                place.writing() if writes else nullcontext() as file,
            ):
                trainer.engine.module.micro_batch_loss = words
                mass = self._write(job, trainer, words, file, place.shape)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{TEACHER}: {folder} does not fit into the GPU's memory; expected more stages, a smaller "
                "train_micro_batch_size_per_gpu, or train_ds_zero.py with ZeRO stage 3"
            ) from error
        with agreed():
            if not place.path.is_file():
                raise ConfigError(
                    f"{place.path}: was just written on this host, and is not there; expected one cache_dir"
                )
        covered = f"its {place.shape[2]} most probable words have {mass:.1%} of the probability"
        took = duration(time.monotonic() - begin)
        job.log.print(f"teacher: log-probabilities of the data computed in {took}; {covered}")

    def _write(
        self, job: JobView, trainer: Trainer, words: TeacherWords, file: BinaryIO | None, shape: tuple[int, ...]
    ) -> float:
        """Write what the teacher finds of all samples; return how much of the probability that is, on average."""
        loader, row = build_loader(self._model.dataset, job.config), 4 * int(numpy.prod(shape[1:]))
        known, device, mass = taught(loader), trainer.engine.device, 0.0
        known.known = _Numbers()
        hidden = True if job.log.quiet else None  # None: only on a terminal
        with paused(), tqdm(total=loader.steps_per_epoch, desc="teacher", disable=hidden, leave=False) as bar:
            for step in range(loader.steps_per_epoch):
                batch = loader.batch(step)
                trainer.eval_loss(loader, batch)
                numbers, own = words.take(device)
                if trainer.groups.tensor.rank > 0:  # finds the same as the first
                    numbers, own = numbers[:0], own[:0]
                for number in range(batch.n_micro_batches):
                    rows = chain.from_iterable(replica[number] for replica in batch.micro_batches)
                    samples = sorted(chain.from_iterable(rows))
                    places = [known.first_tokens[sample : sample + 2].tolist() for sample in samples]
                    tokens = torch.cat([torch.arange(0), *(torch.arange(*place) for place in places)]).to(device)
                    found = torch.zeros(len(tokens), *shape[1:], dtype=torch.int32, device=device)
                    here = torch.isin(numbers, tokens)
                    found[torch.searchsorted(tokens, numbers[here])] = own[here]
                    distributed.all_reduce(found)  # each token is one rank's
                    mass += found[:, 1].contiguous().view(torch.float32).exp().double().sum().item()
                    done = found.cpu().numpy()
                    if file is None:
                        continue
                    for first, end in places:
                        file.seek(first * row)
                        file.write(done[: end - first].tobytes())
                        done = done[end - first :]
                bar.update()
                job.mark("a batch of the teacher")
        return mass / max(shape[0], 1)


class _Numbers:
    """Stand for an array [tokens, 1] in which each token has its own number."""

    def __getitem__(self, tokens: slice, /) -> NDArray[numpy.int64]:
        return numpy.arange(tokens.start, tokens.stop)[:, None]
