"""The samples of a small run: the user's first ones, cut short, and the chunks that their rows pass in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from rich.console import Console

from data.images.image import Image
from data.sample_set import IGNORED, Sample, documents
from data.tokenized.dataset import check_vocabulary
from models.spec import ModelSpec
from options.row_chunks.keys import KEY, ChunkKeys
from training.batches import training_loader
from training.config.keys import TrainConfig
from training.data_setup import RecordReader
from training.language_model import language_model_of

BATCHES = 2.5  # per epoch: its last batch is smaller, and the last step is in the second epoch
EVALUATED = 6  # samples
LENGTH = 48  # most tokens of a sample
CHUNKS = 4  # of a row of the longest sample alone, where rows pass in chunks


def read_samples(
    config: TrainConfig, small: TrainConfig, folder: Path, spec: ModelSpec, log: Console
) -> tuple[list[Sample], list[Sample]]:
    """Read the first samples that the user's run would train on, and some to evaluate on."""
    reader = RecordReader(config, folder, log)
    if config.windows_key:
        data, held_out = language_model_of(config).first_window(config, reader), reader.read_evaluation()
    else:
        data, held_out = reader.read_sets()
    check_vocabulary(reader.tokenizer, int(spec.config.vocab_size), data)
    loader = training_loader(data, config, spec)
    count = math.ceil(BATCHES * small.train_batch_size)
    chosen: dict[int, None] = {}
    for step in range(loader.steps_per_epoch):
        if len(chosen) < count:
            chosen |= dict.fromkeys(loader.batch(step).samples)
    first = [data.samples[number] for number in with_images(list(chosen), data.image_tokens, count)]
    evaluated = data if held_out is None else held_out
    return first, [evaluated.samples[number] for number in range(min(EVALUATED, len(evaluated)))]


def with_images(chosen: Sequence[int], image_tokens: NDArray[Any], count: int) -> list[int]:
    """Take as many of the chosen samples, half of them with images where the set has some.

    Args:
        image_tokens: of all samples.
    """
    there = numpy.flatnonzero(image_tokens).tolist()
    seeing = list(dict.fromkeys([*filter({*there}.__contains__, chosen), *there]))[: math.ceil(count / 2)]
    return list(dict.fromkeys([*seeing, *chosen]))[:count]


def shorten(sample: Sample, words: int) -> Sample:
    """Cut a sample's documents to `LENGTH` tokens around the first trained one of each, with ids modulo `words`."""
    own = documents(sample)
    shortest = min(len(each["input_ids"]) for each in own)
    return joined(sample, [cut_short(each, words, shortest)[0] for each in own])


def joined(sample: Sample, parts: Sequence[Sample]) -> Sample:
    """Put other documents in the place of a sample's own."""
    made, images = sample.copy(), list[Image]()
    made.pop("images", None)
    made["input_ids"] = list(chain.from_iterable(part["input_ids"] for part in parts))
    made["labels"] = list(chain.from_iterable(part["labels"] for part in parts))
    if len(parts) > 1:
        made["first"] = len(parts[0]["input_ids"])
    for part, begin in zip(parts, (0, len(parts[0]["input_ids"])), strict=False):
        images += [image._replace(begin=image.begin + begin) for image in part.get("images", [])]
    return made | {"images": images} if images else made


def distinct(samples: Iterable[Sample]) -> list[Sample]:
    """Leave out pairs that have become equal, as the run would."""
    kept = []
    for sample in samples:
        parts = documents(sample)
        if len(parts) == 1 or parts[0] != parts[1]:
            kept.append(sample)
    return kept


def fit_chunks(config: TrainConfig, samples: Sequence[Sample]) -> tuple[TrainConfig, list[str]]:
    """Fit `row_chunk` to the small samples, with a line for the difference: chunks as long as the user's cut none."""
    if not isinstance(config, ChunkKeys) or not config.row_chunk:
        return config, []
    fitting = max(1, max(len(sample["input_ids"]) for sample in samples) // CHUNKS)
    if config.row_chunk != "auto" and config.row_chunk <= fitting:
        return config, []
    line = f"{KEY}: {config.row_chunk} -> {fitting}, so that short rows pass in several chunks"
    return type(config).model_validate(config.dump() | {KEY: fitting}), [line]


def cut_short(sample: Sample, words: int, shortest: int) -> tuple[Sample, int]:
    """Cut a document as `shorten` does; also return the place of its first trained token.

    Args:
        shortest: tokens of the shortest of its sample's documents, which begin alike and still do once they are cut.
    """
    ids, labels = list(map(int, sample["input_ids"])), list(map(int, sample["labels"]))
    first = next((place for place, label in enumerate(labels) if place and label != IGNORED), 0)
    begin = max(0, min(first - LENGTH // 4, shortest - LENGTH))
    kept = slice(begin, begin + LENGTH)
    labels = [each if each == IGNORED else each % words for each in labels[kept]]
    return {"input_ids": [each % words for each in ids[kept]], "labels": labels}, first - begin
