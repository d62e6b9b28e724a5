"""A language model and its records, as a job trains them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy
from rich.console import Console

from data.collation import Collation
from data.loader import Loader
from data.paths import digests_folder
from data.sample_set import SampleSet
from data.tokenized.dataset import Dataset, check_vocabulary
from models.checkpoint.hub import find_model
from models.checkpoint.layout import MANIFEST, resolve
from models.spec import ModelSpec
from training.batches import build_loader, training_loader
from training.checkpoint.folder import DataOrder, check_weights
from training.checkpoint.side_files import read_side_files
from training.config.deepspeed_config import check_device, check_fp8, check_length, check_sharing
from training.config.keys import TrainConfig
from training.data_setup import RecordReader
from training.distributed.disk import Disk
from training.distributed.joining import set_threads
from training.distributed.processes import agreed
from training.engine.trainer import Trainer
from training.evaluation import Evaluation
from training.job import Job, Task
from training.option import model_for, options_of
from training.preflight import check_model
from training.topology import Division
from training.trained import (
    adapter_file,
    check_same_base,
    check_same_model,
    describe_start,
    describe_trained,
    in_checkpoint,
    with_trained,
)
from training.unplanned import split_as_configured, usual_kernels
from training.usual_rate import rate_warnings


class LanguageModel(Task):
    """A language model of any family, trained on records.

    Args:
        kind: how the model is spread: `PipelineTrainer` or `ZeroTrainer`.
        read_spec: reads a model folder's config.json and finds its family (`models.api.read_spec`).

    Attributes:
        dataset: the records to train on.
        held_out: the records to evaluate on, if any.
        other_models: that the objective needs: the config's key -> folder and spec.
    """

    spec: ModelSpec
    model_folder: Path
    dataset: Dataset
    loader_kind: ClassVar[type[Loader]] = Loader

    def __init__(self, kind: type[Trainer], read_spec: Callable[[Path], ModelSpec]) -> None:
        self.kind, self._read_spec = kind, read_spec
        self.in_stages = kind.in_stages
        self.other_models: dict[str, tuple[Path, ModelSpec]] = {}

    @property
    def known_loader(self) -> Loader | None:
        """The loader, where lengths of all samples are known before the first step."""
        return self.loader if self.loader.knows_lengths else None

    @property
    def known_records(self) -> Dataset | None:
        """The records whose lengths are known before the first step."""
        return self.dataset

    def read(self, config: TrainConfig, disk: Disk, log: Console) -> None:
        folder = find_model(config.model_path, weights=not config.from_scratch)
        language = self._read_spec(folder)
        if config.objective.says_words:
            language.check_writes(folder)
        spec = with_trained(language, config)
        check_device(config)
        config.parts_for(spec.n_layers)  # checked before the data are read, which takes longer
        check_fp8(config, spec)
        check_length(config, spec)
        check_sharing(config, spec)
        reader = RecordReader(config, folder, log)
        self.other_models = config.objective.other_models(spec, folder, self._read_spec)
        self.dataset, self.held_out = self._sets(config, reader)
        sets = [self.dataset] if self.held_out is None else [self.dataset, self.held_out]
        spec = model_for(config, spec, sets)
        self.spec, self.model_folder, self._shows = spec, folder, not log.quiet
        self.make_batches(config)
        check_vocabulary(reader.tokenizer, int(spec.config.vocab_size), *sets)
        self.side_files, notes = {}, digests_folder(config.cache_dir)
        if disk.owns_folder:
            self.side_files = read_side_files(folder, spec.language or in_checkpoint(spec).base, reader.ends)
            if config.lora:
                self.side_files |= adapter_file(spec, folder, notes)
            if spec.labels or spec.language:
                self.side_files["config.json"] = (json.dumps(spec.raw, indent=2) + "\n").encode()
            if spec.language:
                self.side_files.pop(MANIFEST, None)  # it lists the weights of the language model
        self.n_layers, self._notes = spec.n_layers, notes
        self.order = DataOrder(
            samples=len(self.dataset),
            fingerprint=self.dataset.fingerprint(),
            seed=config.seed,
            train_batch_size=config.train_batch_size,
            dataloader_drop_last=config.dataloader_drop_last,
            packed_epoch=self.loader.row_length if config.packing == "dataset" else 0,
        )

    def make_batches(self, config: TrainConfig) -> None:
        """Divide the records into batches and micro-batches, those to evaluate on too."""
        own = self.collation(config, self.dataset)
        self.loader = training_loader(self.dataset, config, self.spec, self.loader_kind, own)
        self.evaluation = None
        if self.held_out is not None:
            held_out = self.held_out
            numbers = {kind: numpy.flatnonzero(held_out.of_type(kind)) for kind in held_out.types}
            loaders = {
                kind: build_loader(held_out, config, numbers=its, collation=self.collation(config, held_out))
                for kind, its in numbers.items()
            }
            self.evaluation = Evaluation(
                loaders, config, self.loader.steps_per_epoch, self._shows, held_out.fingerprint()
            )

    def collation(self, config: TrainConfig, data: SampleSet) -> Collation:
        """Return what a loader of these samples has to know for the objective and for options."""
        made = config.objective.collation(data)
        for option in options_of(config):
            made = option.collation(config, self, made)
        return made

    def check_checkpoint(self, folder: Path) -> None:
        check_same_model(self.spec, folder)
        if self.spec.trained.lora:
            check_same_base(folder, self.model_folder, self.spec, self._notes)

    def check_weights(self, job: Job) -> None:
        begins = job.progress.checkpoint is None and not job.config.from_scratch
        check_model(self.model_folder, begins, self._notes)
        others = {key: folder for key, (folder, _) in self.other_models.items()}
        for key, folder in others.items():
            check_model(folder, True, self._notes, key)
        with agreed():
            if begins and job.disk.owns_folder:  # a run's checkpoints have sums
                adapter = job.config.lora.start_from if job.config.lora else None
                given = [self.model_folder, *([resolve(adapter, adapter=True)] if adapter else [])]
                for folder in [*given, *others.values()]:
                    check_weights(folder)

    def divide(self, config: TrainConfig) -> Division:
        return split_as_configured(config, self.spec, self.in_stages)

    def begin(self, job: Job) -> None:
        set_threads(job.process.local_size, self.spec.config.hidden_size)
        if not job.config.is_planned:
            job.report += usual_kernels(job.config, self.spec)

    def build(self, job: Job) -> Trainer:
        checkpoint, config = job.progress.checkpoint, job.config
        if checkpoint:
            config = config.model_copy(update={"from_scratch": False})
        return self.kind.build(config, self.spec, checkpoint or self.model_folder, job.division)

    def origin(self, sample: int) -> str:
        return self.dataset.origin(sample)

    def describe_model(self, job: Job) -> list[str]:
        spec = self.spec
        model = f"model: {spec.family.name}, {spec.n_layers} layers {job.division.topology.description}"
        family = [f"family: {spec.family.proof}"] if spec.family.proof else []
        topology, known = job.division.topology, job.progress.known
        before = known.topology if known else topology
        trained = [*describe_trained(spec, before.tensor, topology.tensor), *describe_start(job.config)]
        return [model, *family, *trained, *rate_warnings(job.config, spec)]

    def describe_data(self, job: Job) -> None:
        config, log = job.config, job.log
        if config.zero_optimization.offloads and config.zero_force_ds_cpu_optimizer:
            log.print("optimizer: on the CPU; DeepSpeed compiles its part at the first use, about a minute")
        samples = "rows" if config.packing == "dataset" else "samples"
        an_epoch = f", {self.loader.steps_per_epoch} an epoch" if self.known_loader else ""
        log.print(f"steps: {job.progress.total_steps} of {config.train_batch_size} {samples}{an_epoch}")

    @staticmethod
    def first_window(config: TrainConfig, reader: RecordReader) -> Dataset:
        """Read the records of the first window, where they come in windows."""
        raise NotImplementedError

    def _sets(self, config: TrainConfig, reader: RecordReader) -> tuple[Dataset, Dataset | None]:
        """The records to train on, and those to evaluate on, if any."""
        return reader.read_sets()


def language_model_of(config: TrainConfig) -> type[LanguageModel]:
    """Return the task by which a config trains a language model."""
    for option in options_of(config):
        if kind := option.language_model(config):
            assert issubclass(kind, LanguageModel)
            return kind
    return LanguageModel
