"""Make the user's run small, in a temporary folder: config, model, tokenizer and records.

The config gets few steps, short samples, and no more processes than this machine can run. Unchanged are precision,
optimizer, clipping, schedule, losses, packing, recomputation, offload, compilation, attention, the axes, and the form
of `dims` and `parts`.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import Tensor

from data.images.pictures import Pictures
from data.sample_set import InMemory, Sample
from models.adapters import ALL_LINEAR, is_factor
from models.api import read_spec
from models.checkpoint.hub import find_model
from models.checkpoint.layout import layer_file, side_files
from models.checkpoint.side_files import copy_files
from models.checkpoint.tensor_files import save_state_dict
from models.config_json import TEXT
from models.derived.shrink import is_dropout, shrunk_fields
from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT
from models.images.small import VISION
from models.images.small import small_fields as small_whole_fields
from models.quantized_base import FP8
from models.spec import ModelSpec
from options.proof.images import SmallImages, fit_length, name_weights
from options.proof.launches import LaunchedRun
from options.proof.samples import LENGTH, distinct, fit_chunks, read_samples, shorten
from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo
from training.config.precision import training_dtype
from training.errors import ConfigError
from training.option import model_for
from training.trained import adapter_file, with_trained

MODEL, ADAPTER, DATA, EVALUATION = "model", "adapter", "data.jsonl", "evaluation.jsonl"  # in the folder
STEPS, SAVED = 4, 2  # steps; the step to resume from
MICRO_BATCH = 4  # most rows
PROCESSES = 4  # without GPUs, if there are no more cores
PARTS = 2  # most tensor-parallel ranks: a small model may have no more key heads
LR = 1e-3  # least: a smaller update drowns in the rounding of the weights
WARM_UP = 2  # most steps
B_SIZE = 0.1  # of an adapter's B, so that sums with the weights keep about their size
LOSS_SCALE = 8  # initial power of two for fp16, small enough that no step is skipped
# Keys that the prepared samples do not need, or that only take time.
DROPPED_KEYS = (
    "stream_gb pack_len gradient_accumulation_steps profile_steps rebalance storage save_minutes template_args "
    "template_fallback max_restarts ports eval_share".split()
)


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
    def make(cls, config: TrainConfig, folder: Path, log: Console) -> SmallRun:
        """Read the user's config.json, tokenizer and records, and write small ones to `folder`.

        Raises:
            CheckpointError, ConfigError, DataError: they are unusable.
        """
        source = find_model(config.model_path, weights=False)
        whole = with_trained(read_spec(source), config)
        config.parts_for(whole.n_layers)
        topo = small_topology(config, available_processes())
        small, differs = small_config(config, whole, topo, folder)
        samples, evaluated = read_samples(config, small, source, whole, log)
        sets = [InMemory(samples), InMemory(evaluated)]
        whole = model_for(config, whole, sets)
        if topo.parts and topo.parts[0] < whole.first_layers:
            topo = topo.model_copy(update={"parts": [whole.first_layers, *topo.parts[1:]]})
            small = small.model_copy(update={"model_topo": topo})
        model = folder / MODEL
        model.mkdir()
        (folder / ADAPTER).mkdir()
        copy_files(source, model, side_files(source))
        begin = (whole.fresh and whole.language) or whole  # without layers that a run makes
        fields = small_fields(begin, small_depth(config, topo, whole.n_layers) - 2)
        (model / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        spec = read_spec(model)
        small, lines = small_trained(small, spec)
        spec = model_for(small, with_trained(spec, small), sets)
        differs += lines
        words = int(spec.config.vocab_size)
        if any(each.has_images for each in sets) and (sees := spec.family.sees):
            cut = SmallImages(Pictures(source, *config.pixels), sees.image_token, words, folder)
            samples, evaluated = map(cut.shorten, (samples, evaluated))
            small, lines = fit_length(small, [*samples, *evaluated])
            differs += lines
            name_weights(model, spec)
        else:
            cut_text = partial(shorten, words=words)
            samples, evaluated = (list(map(cut_text, each)) for each in (samples, evaluated))
        samples, evaluated = map(distinct, (samples, evaluated))
        small, lines = fit_chunks(small, samples)
        differs += lines
        formula = small.objective.formula()
        for name, each in ((DATA, samples), (EVALUATION, evaluated)):
            lines = [json.dumps(formula.record(sample)) + "\n" for sample in each]
            (folder / name).write_text("".join(lines), encoding="utf-8")
        sizes = [f"{spec.n_layers} of {whole.n_layers} layers"]
        for name, meaning in (("hidden_size", "hidden"), ("vocab_size", "vocabulary")):
            sizes.append(f"{meaning} {getattr(spec.config, name):,} of {getattr(whole.config, name):,}")
        differs.insert(0, f"model: random weights, {', '.join(sizes)}; token ids modulo that")
        before, after = (each.get(TEXT, each) for each in (begin.raw, fields))
        if any(is_dropout(name) and value != after[name] for name, value in before.items()):
            differs.append("dropout: none, as each process draws other random numbers")
        made = cls(small, spec, samples, evaluated, differs, folder)
        made.write_weights(config.seed)
        return made

    def write_weights(self, seed: int) -> None:
        """Write the model's random weights, other ones for another seed, and the adapter that the run starts from."""
        model, adapter = self.folder / MODEL, self.folder / ADAPTER
        write_model(model, self.spec.language or self.spec.base, seed)
        if self.config.lora:
            write_model(adapter, self.spec, self.config.seed)
            (adapter / "config.json").write_text(json.dumps(self.spec.raw), encoding="utf-8")
            for name, content in adapter_file(self.spec, model).items():
                (adapter / name).write_bytes(content)

    def start(self, script: str, name: str, **changes: Any) -> LaunchedRun:
        """Prepare a run with a `save_path` of its own, and with `changes` of the config."""
        start = LaunchedRun(script, self.folder / f"{name}.yml", self.folder / name, self.folder / f"{name}-notes")
        values = self.config.dump() | {"save_path": str(start.folder)} | changes
        start.config.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return start


def small_fields(spec: ModelSpec, n_blocks: int) -> dict[str, Any]:
    """Shrink a model's config.json; of a model of images and text the tower too."""
    if not spec.is_part:
        return shrunk_fields(spec.config, spec.raw, n_blocks)
    if VISION in spec.raw:
        return small_whole_fields(spec.raw, spec.config, spec.fields, n_blocks, same_pictures=True)
    return dict(spec.raw) | {TEXT: shrunk_fields(spec.config, spec.fields, n_blocks)}


def available_processes() -> int:
    """Return the number of processes that a proof may start on this machine."""
    return torch.cuda.device_count() or max(PROCESSES, len(os.sched_getaffinity(0)))


def small_topology(config: TrainConfig, processes: int) -> ModelTopo:
    """Return the same grid if it fits, else fewer stages and at most two replicas; uneven parts stay uneven."""
    topo = config.model_topo
    stages, replicas, tensor = topo.stages, topo.replicas, min(topo.tensor, PARTS, processes)
    if stages * replicas * tensor > processes:
        left = processes // tensor
        stages = min(stages, max(1, left // min(replicas, 2)))
        replicas = min(replicas, left // stages)
    small = topo.spread(stages, replicas, tensor).model_copy(update={"sequence": math.gcd(topo.sequence, replicas)})
    if topo.parts is None or stages != topo.stages:
        return small
    least, size = min(topo.parts), max(2, 4 // len(topo.parts))
    parts = [min(each, size if each == least else size + 1) for each in topo.parts]
    return small.model_copy(update={"parts": parts})


def small_depth(config: TrainConfig, topo: ModelTopo, n_layers: int) -> int:
    """Return the layers of the small model: the sum of `parts`, or two for each chunk and one more."""
    chunks = config.model_copy(update={"model_topo": topo}).chunks
    return sum(topo.parts) if topo.parts else min(n_layers, max(5, 2 * chunks + 1))


def small_config(config: TrainConfig, spec: ModelSpec, topo: ModelTopo, folder: Path) -> tuple[TrainConfig, list[str]]:
    """Make the config of the small run in `folder`, and a line for each difference from the user's.

    Raises:
        ConfigError: the run keeps no fp32 weights to compare, or its objective has no formula.
    """
    for name in ("bf16", "fp16"):
        if getattr(getattr(config, name), key := f"{name}_master_weights_and_grads"):
            raise ConfigError(f"--prove: {name}.{key} leaves no fp32 weights to compare; expected none of it")
    if config.bf16.bf16_optimizer_states:
        raise ConfigError("--prove: bf16.bf16_optimizer_states rounds by chance; expected none of it")
    config.objective.formula()  # refuses what has none
    values, before, lr = config.dump(), config.model_topo, config.optimizer.params.get("lr", LR)
    exact_router = spec.has_experts and training_dtype(config) is not torch.float32
    ordered = torch.cuda.is_available() and not config.deterministic
    changes = (
        (
            topo.processes != before.processes,
            f"dims: {before.process_topology.dims} -> {topo.process_topology.dims}, as this machine has room for "
            f"{available_processes()} processes, and a small layer for {PARTS} parts",
        ),
        (exact_router, "precision: fp32, as rounding alone can make a router choose another expert"),
        (ordered, "deterministic: true, as without it no two runs on a GPU are equal to the last bit"),
        (config.tf32, "tf32: false, as the bounds are those of fp32"),
        (config.fp8.enabled, "fp8: off, as the bounds are those of bf16"),
        (lr < LR, f"lr: {lr:g} -> {LR:g}, so that a step is larger than the rounding of a weight"),
        (config.windows_key, f"{config.windows_key}: the samples of the first window, not streamed"),
    )
    if exact_router:
        values |= {"bf16": {}, "fp16": {}}
    elif config.fp16.enabled and config.fp16.loss_scale is None:
        values["fp16"]["initial_scale_power"] = LOSS_SCALE
    if lr < LR:
        values["optimizer"]["params"]["lr"] = LR
    if config.scheduler:
        warm_up = config.scheduler.params.warmup_num_steps
        values["scheduler"]["params"]["warmup_num_steps"] = min(warm_up, WARM_UP)
    if isinstance(config.use_grad_ckpt, dict):
        values["use_grad_ckpt"] = {"every": min(config.use_grad_ckpt["every"], 2)}
    micro_batch = min(config.micro_batch_size, MICRO_BATCH)
    steps = config.train_batch_size // (config.micro_batch_size * before.replicas)
    chunks = config.model_copy(update={"model_topo": topo}).chunks
    for key in DROPPED_KEYS:
        values.pop(key, None)
    values |= {
        "model_path": str(folder / MODEL),
        "data_path": [{"path": str(folder / DATA), "format": "tokens"}],
        "eval_data_path": [{"path": str(folder / EVALUATION), "format": "tokens"}],
        "save_path": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "model_topo": topo.model_dump(mode="json", exclude_none=True),
        "train_micro_batch_size_per_gpu": micro_batch,
        "train_batch_size": micro_batch * topo.replicas * min(steps, 4 * chunks),
        "max_steps": STEPS,
        "max_seq_len": LENGTH,
        "dataloader_drop_last": config.dataloader_drop_last and config.packing != "dataset",  # too few rows
        "from_scratch": False,
        "prompt_format": "plain",
        "mask": "assistant",
        "resume": "auto",
        "save_interval": SAVED,
        "keep_last": STEPS,
        "eval_interval": SAVED,
        "export_hf": False,
        "deterministic": config.deterministic or ordered,
        "tf32": False,
        "fp8": {},
        "trackers": [],
    }
    if config.packing:
        values["pack_len"] = 2 * config.objective.documents * LENGTH
    return type(config).model_validate(values), [line for changed, line in changes if changed]


def small_trained(config: TrainConfig, spec: ModelSpec) -> tuple[TrainConfig, list[str]]:
    """Fit what is trained to the small model, with a line for each difference."""
    values, differs = config.dump(), []
    if config.lora:
        lora = values["lora"] | {"r": 1, "dropout": 0.0, "start_from": str(Path(config.model_path).with_name(ADAPTER))}
        if config.lora.base == FP8:
            lora["base"] = None
            differs.append("lora.base: none, as the small model is not stored in fp8")
        values["lora"] = lora
        try:
            adapted = with_trained(spec, type(config).model_validate(values))
        except ConfigError:
            lora |= {"targets": ALL_LINEAR, "modules_to_save": []}
            differs.append("lora.targets: all-linear, as the small model has none of the layers that are named")
            adapted = with_trained(spec, type(config).model_validate(values))
        shapes = chain.from_iterable(adapted.shapes(layer).items() for layer in range(spec.n_layers))
        sizes = [shape[-1 if name.endswith("A") else -2] for name, shape in shapes if is_factor(name)]
        lora["r"] = min(config.lora.r, *sizes)
        if lora["r"] < config.lora.r:
            differs.append(f"lora.r: {config.lora.r} -> {lora['r']}, as layers are narrow")
        differs.append("lora: begins with random factors, as with a B of zeros nothing reaches A")
        if lora.get("base") and config.model_topo.tensor > 1:
            lora["base"] = None
            differs.append("lora.base: none, as parts of a weight are rounded to 4 bits otherwise than the whole one")
        if config.lora.dropout:
            differs.append("lora.dropout: 0, as each process draws other random numbers")
    if config.freeze:
        try:
            with_trained(spec, config)
        except ConfigError:
            embedding = spec.path(0, EMBEDDING_WEIGHT)
            values["freeze"] = [re.escape(embedding)]
            differs.append(
                f"freeze: {embedding}, as the small model has none of the layers that are named, or no others"
            )
    return type(config).model_validate(values), differs


def write_model(folder: Path, spec: ModelSpec, seed: int) -> None:
    """Write layer files of random fp32 weights; no tensor is constant, so no gradient is zero or flat."""
    for layer in range(spec.n_layers):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + layer)
            state = {name: _random(tensor) for name, tensor in spec.build(layer).state_dict().items()}
        for name in (each for each in state if each.endswith("lora_B")):
            state[name] *= B_SIZE
        if spec.tied and layer == 0:
            embedding = state[EMBEDDING_WEIGHT]
        if spec.tied and layer == spec.n_layers - 1:
            state[HEAD_WEIGHT] = embedding
        kept = spec.trained_names(layer) if spec.trained.lora else state  # as the checkpoint of a run has them
        save_state_dict({name: state[name] for name in kept}, folder / layer_file(layer))


def _random(tensor: Tensor) -> Tensor:
    """Randomize a tensor: matrices so that products keep their size, norms and biases around their start."""
    if tensor.dim() > 1:
        summed = tensor.shape[1:].numel() if tensor.dim() > 3 else tensor.shape[-1]  # of a convolution over pixels
        return torch.randn_like(tensor) / summed**0.5
    return tensor + 0.1 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor
