"""A few short samples of a run's own, in the vocabulary of the small model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data.loader import Loader
from data.tokenized.tokenize import IGNORED, Sample
from training.proof.shrink_config import LENGTH


def first_samples(loader: Loader, count: int) -> list[Sample]:
    """The first that a run trains on, or all where there are fewer."""
    chosen: dict[int, None] = {}
    for step in range(loader.steps_per_epoch):
        chosen |= dict.fromkeys(loader.batch(step).samples)
        if len(chosen) >= count:
            break
    return [loader.data.samples[number] for number in list(chosen)[:count]]


def shrunk(samples: Sequence[Sample], words: int) -> list[Sample]:
    """Each cut to where its loss begins, with ids below `words`."""
    return [_small(sample, words) for sample in samples]


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """As records of the format `tokens`."""
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")


def _small(sample: Sample, words: int) -> Sample:
    ids, labels = [int(each) for each in sample["input_ids"]], [int(each) for each in sample["labels"]]
    first = next((place for place, label in enumerate(labels) if place and label != IGNORED), 0)
    begin = max(0, min(first - LENGTH // 4, len(ids) - LENGTH))
    kept = slice(begin, begin + LENGTH)
    return {
        "input_ids": [each % words for each in ids[kept]],
        "labels": [each if each == IGNORED else each % words for each in labels[kept]],
    }
