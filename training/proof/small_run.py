"""Write the small run of a proof to a temporary folder: model, tokenizer, records and config."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from rich.console import Console
from torch import Tensor

from data.sample_set import IGNORED, Sample
from data.tokenized.dataset import check_vocabulary
from models.api import read_spec
from models.checkpoint.layout import layer_file, resolve, side_files
from models.checkpoint.side_files import copy_files
from models.checkpoint.tensor_files import save_state_dict
from models.derived.shrink import is_dropout, shrunk_fields
from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.data_setup import RecordReader, training_loader
from training.proof.launches import Start
from training.proof.shrink_config import DATA, EVALUATION, LENGTH, MODEL, small_config, small_depth, small_topology
from training.streamed import stream_of

BATCHES = 2.5  # per epoch: its last batch is smaller, and the last step is in the second epoch
EVALUATED = 6  # samples


@dataclass(frozen=True)
class SmallRun:
    """The small version of the user's run.

    Attributes:
        samples, evaluated: to train on, and to evaluate on.
        differs: a line for each difference from the user's run.
        folder: has all of its files.
    """

    config: TrainConfig
    spec: ModelSpec
    samples: list[Sample]
    evaluated: list[Sample]
    differs: list[str]
    folder: Path

    @classmethod
    def make(cls, config: TrainConfig, folder: Path, processes: int, log: Console) -> SmallRun:
        """Read the user's config.json, tokenizer and records, and write small ones to `folder`.

        Args:
            processes: that the small run may have.

        Raises:
            CheckpointError, ConfigError, DataError: they are unusable.
        """
        source = resolve(config.model_path)
        whole = read_spec(source)
        config.parts_for(whole.n_layers)
        topo = small_topology(config, processes)
        small, differs = small_config(config, whole, topo, folder)
        samples, evaluated = _read_samples(config, small, source, whole, log)
        model = folder / MODEL
        model.mkdir()
        copy_files(source, model, side_files(source))
        fields = shrunk_fields(whole.config, whole.raw, small_depth(config, topo, whole.n_layers) - 2)
        (model / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        spec = read_spec(model)
        write_model(model, spec, config.seed)
        words = int(spec.config.vocab_size)
        samples, evaluated = ([shorten(sample, words) for sample in each] for each in (samples, evaluated))
        for name, each in ((DATA, samples), (EVALUATION, evaluated)):
            (folder / name).write_text("".join(json.dumps(sample) + "\n" for sample in each), encoding="utf-8")
        sizes = [f"{spec.n_layers} of {whole.n_layers} layers"]
        for name, meaning in (("hidden_size", "hidden"), ("vocab_size", "vocabulary")):
            sizes.append(f"{meaning} {getattr(spec.config, name):,} of {getattr(whole.config, name):,}")
        differs.insert(0, f"model: random weights, {', '.join(sizes)}; token ids modulo that")
        if any(is_dropout(name) and value != fields[name] for name, value in whole.raw.items()):
            differs.append("dropout: none, as each process draws other random numbers")
        return cls(small, spec, samples, evaluated, differs, folder)

    def start(self, script: str, name: str) -> Start:
        """Prepare a run with a `save_path` of its own."""
        start = Start(script, self.folder / f"{name}.yml", self.folder / name, self.folder / f"{name}-notes")
        values = self.config.dump() | {"save_path": str(start.folder)}
        start.config.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return start


def _read_samples(
    config: TrainConfig, small: TrainConfig, folder: Path, spec: ModelSpec, log: Console
) -> tuple[list[Sample], list[Sample]]:
    """Read the first samples that the user's run would train on, and some to evaluate on."""
    reader = RecordReader(config, folder, log)
    if config.stream_gb:
        data, held_out = stream_of(config, reader).windows.peek(), reader.read_evaluation()
    else:
        data, held_out = reader.read_sets()
    check_vocabulary(reader.tokenizer, int(spec.config.vocab_size), data)
    loader = training_loader(data, config, spec)
    count = math.ceil(BATCHES * small.train_batch_size)
    chosen: dict[int, None] = {}
    for step in range(loader.steps_per_epoch):
        if len(chosen) < count:
            chosen |= dict.fromkeys(loader.batch(step).samples)
    first = [data.samples[number] for number in list(chosen)[:count]]
    evaluated = data if held_out is None else held_out
    return first, [evaluated.samples[number] for number in range(min(EVALUATED, len(evaluated)))]


def shorten(sample: Sample, words: int) -> Sample:
    """Cut a sample to `LENGTH` tokens around its first trained one, with ids modulo `words`."""
    ids, labels = ([int(each) for each in numbers] for numbers in (sample["input_ids"], sample["labels"]))
    first = next((place for place, label in enumerate(labels) if place and label != IGNORED), 0)
    begin = max(0, min(first - LENGTH // 4, len(ids) - LENGTH))
    kept = slice(begin, begin + LENGTH)
    labels = [each if each == IGNORED else each % words for each in labels[kept]]
    return {"input_ids": [each % words for each in ids[kept]], "labels": labels}


def write_model(folder: Path, spec: ModelSpec, seed: int) -> None:
    """Write layer files of random fp32 weights; no tensor is constant, so no gradient is zero or flat."""
    for layer in range(spec.n_layers):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + layer)
            state = {name: _random(tensor) for name, tensor in spec.build(layer).state_dict().items()}
        if spec.tied and layer == 0:
            embedding = state[EMBEDDING_WEIGHT]
        if spec.tied and layer == spec.n_layers - 1:
            state[HEAD_WEIGHT] = embedding
        save_state_dict(state, folder / layer_file(layer))


def _random(tensor: Tensor) -> Tensor:
    """Randomize a tensor: matrices so that products keep their size, norms and biases around their start."""
    if tensor.dim() > 1:
        return torch.randn_like(tensor) / tensor.shape[-1] ** 0.5
    return tensor + 0.1 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor
