"""Make global batches of any dataset, in an order that is a pure function of seed and step.

Every batch is full: an epoch leaves out the rest, different samples each time. So micro-batches have the same size, and
the mean of their losses is that of the batch. While a sample is made, torch's generator is seeded with the run's seed,
the step and the sample. So augmentations are the same on the first stage, which reads the inputs, on the last, which
reads the labels, and in a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from data.loader import GlobalBatch, Loader
from options.any_layers.config import PipelineConfig
from training.config.precision import training_dtype
from training.engine.trainer import Sent
from training.errors import ConfigError

Collate = Callable[[list[Any]], Any]


class _UnitSamples:
    """Samples for `Loader`, each of which counts as one trained token."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.lengths = self.supervised = numpy.ones(len(samples), dtype=numpy.int32)
        self.first = self.first_supervised = numpy.zeros(len(samples), dtype=numpy.int32)
        self.values = numpy.zeros(len(samples), dtype=numpy.float32)
        self.image_tokens = numpy.zeros(len(samples), dtype=numpy.int32)


class SampleLoader(Loader):
    """Distributes the samples of a dataset over micro-batches and replicas.

    Args:
        dataset: has a length and samples `(inputs, labels)`, each a tensor or a tuple of tensors.
        collate: makes a micro-batch from a list of samples; by default torch's `default_collate`, which stacks them.
        evaluates: whether to evaluate; then all samples are used that fill a micro-batch for each replica.
    """

    def __init__(
        self, dataset: Dataset[Any], config: PipelineConfig, collate: Collate | None = None, evaluates: bool = False
    ) -> None:
        samples: Any = dataset
        rows, replicas = config.micro_batch_size, config.model_topo.replicas
        what, least, why = "dataset", config.train_batch_size, "train_batch_size"
        if evaluates:
            what, least, why = "eval_dataset", rows * replicas, "a micro-batch for each replica"
        if isinstance(samples, IterableDataset) or not hasattr(samples, "__len__"):
            found = f"{type(dataset).__name__} has no length"
            raise ConfigError(f"{what}: {found}; expected one with __len__ and __getitem__")
        if len(samples) < least:
            raise ConfigError(f"{what}: {len(samples)} samples; expected at least {least}, {why}")
        numbers = range(len(samples) // least * least) if evaluates else None
        sizes = config.train_batch_size, rows, replicas
        super().__init__(_UnitSamples(dataset), *sizes, config.seed, drop_last=not evaluates, numbers=numbers)
        self._collate_samples = collate or default_collate
        self._dtype = training_dtype(config)
        self._step = 0

    def batch(self, step: int) -> GlobalBatch:
        self._step = step
        return super().batch(step)

    def batch_of(self, chosen: Sequence[int]) -> GlobalBatch:
        """Make a batch of these samples; a single one is repeated to fill a micro-batch for each replica."""
        return super().batch_of([*chosen] * (self.micro_batch_size * self.replicas if len(chosen) == 1 else 1))

    def micro_batches(self, batch: GlobalBatch, replica: int) -> Iterator[Sent]:
        """Yield a replica's micro-batches `(inputs, labels)`, two tuples of tensors; inputs have the training dtype."""
        for rows in batch.micro_batches[replica]:
            made = self._collate_samples([self._sample(number) for number in chain.from_iterable(rows)])
            if not isinstance(made, (tuple, list)) or len(made) != 2:
                raise ConfigError(f"dataset: expected samples (inputs, labels), found {type(made).__name__}")
            inputs = (each.to(self._dtype) if each.is_floating_point() else each for each in _tensors(made[0]))
            yield tuple(inputs), _tensors(made[1])

    def _sample(self, number: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            seed = numpy.random.SeedSequence([self.seed, self._step, number]).generate_state(1)[0]
            torch.default_generator.manual_seed(int(seed))  # torch.manual_seed would seed GPUs too, where dropout draws
            return self.data.samples[number]


def _tensors(value: Any) -> tuple[Tensor, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for each in values:
        if not isinstance(each, Tensor):
            raise ConfigError(f"dataset: expected tensors as inputs and labels, found {type(each).__name__}")
    return values
