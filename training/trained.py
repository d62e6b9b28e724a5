"""Which weights of a model a config trains: all, all but the frozen ones, or adapters."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from common.quantities import counted
from data.paths import digests_folder
from models.adapters import ALL, Lora, Trained, ends_with, is_factor
from models.ahead.model import ahead_in_layers
from models.checkpoint.adapter import (
    AdaptedStates,
    LayerFiles,
    check_base,
    check_eyes,
    digest_of_base,
    labels_of_adapter,
    open_factors,
)
from models.checkpoint.adapter_settings import SAW, adapted_paths, peft_config, read_settings, with_adapter
from models.checkpoint.digest import DIGEST, eyes_digest, model_digest
from models.checkpoint.hub import find_model
from models.checkpoint.layout import ADAPTER, resolve
from models.checkpoint.source import HuggingFaceSource, PipelineSource, first_few, open_source
from models.config_json import QUANTIZATION, model_fields, read_json
from models.errors import CheckpointError
from models.family import EYES, HEAD_WEIGHT
from models.images.layer_files import eyes_in_layers
from models.loading import LayerStates, NewScores, SeededStates
from models.quantized_base import FP8, NF4, PACKAGE
from models.scores import SCORE, check_labels, labels_of, padding_problem
from models.spec import ModelSpec
from training.config.changes import differs
from training.config.keys import TrainConfig
from training.errors import ConfigError

# Keys of config.json that do not affect the computation.
UNUSED = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", QUANTIZATION}
few = partial(first_few, most=12)  # names that fit into a message


def with_trained(spec: ModelSpec, config: TrainConfig) -> ModelSpec:
    """Say in a model's spec what the config trains of it; its objective may ask for another model.

    Raises:
        ConfigError: a name or a pattern matches nothing, or nothing is left to train.
    """
    if spec.family.ahead and not config.objective.looks_ahead:
        what = "its last layer has the layers ahead that a run trained, which would no longer fit"
        raise ConfigError(f"model_path: {what}; expected to train them along, or the folder that pp_to_hg makes of it")
    lora, spec = config.lora, config.objective.model(spec)
    if lora is None and not config.freeze:
        return spec
    adapters = None
    if lora is not None:
        names = lora.model_dump(include={"r", "alpha", "dropout", "rslora", "experts", "base"})
        targets = lora.targets if isinstance(lora.targets, str) else tuple(lora.targets)
        whole = tuple(dict.fromkeys([*lora.modules_to_save, *(SCORE for _ in spec.labels)]))  # as peft has it
        adapters = Lora(targets=targets, modules_to_save=whole, **names)
    trained = spec.training(Trained(adapters, tuple(pattern.pattern for pattern in config.freeze)))
    if not config.adapts_beside:
        check_names(trained)
    if adapters and adapters.base:
        _check_base(trained, config)
    return trained


def describe_trained(spec: ModelSpec, before: int = 1, now: int = 1) -> list[str]:
    """Say, for the log, how many parameters are trained if not all, and on which base, of as many shares of a layer."""
    problem = padding_problem(spec.config) if spec.labels else None
    lines = [f"warning: scores: {problem}"] if problem else []
    if spec.trained == ALL:
        return lines
    trained = whole = 0
    for layer in range(spec.n_layers):
        shapes, shared = spec.shapes(layer), {HEAD_WEIGHT} if spec.tied else set()  # which the embedding holds, too
        trained += sum(shapes[name].numel() for name in {*spec.trained_names(layer)} - shared)
        whole += sum(shape.numel() for name, shape in spec.base.shapes(layer).items() if name not in shared)
    how, lora = "all that freeze does not name", spec.trained.lora
    if lora:
        how = f"adapters of rank {lora.r} on {counted(sum(map(len, adapted_paths(spec))), 'weight')} (lora)"
    lines.append(f"trained: {counted(trained, 'parameter')}, {how}; the model has {whole:,}")
    if lora and lora.base == NF4:
        what = "the run trains and evaluates over the rounded base"
        lines.append(f"lora.base: nf4: {what}; an export over the base's own weights has another loss")
        if (before, now) != (1, 1):
            then = f", {before} at the checkpoint" if before != now else ""
            lines.append(
                f"lora.base: nf4, {counted(now, 'share')} of a layer{then}, each rounded by itself: another base"
            )
    return lines


def describe_start(config: TrainConfig) -> list[str]:
    """Say, for the log, that nothing tells whether an adapter to start from was trained on this base, if so."""
    if not (config.lora and config.lora.start_from):
        return []
    start = resolve(config.lora.start_from, adapter=True)
    if digest_of_base(start):
        return []
    name = read_settings(start).base_model_name_or_path or "no base"
    return [f"lora.start_from: {start} names {name} and has no digest of it: not compared with {config.model_path}"]


def check_start(config: TrainConfig, spec: ModelSpec) -> None:
    """Refuse an adapter to start from that is not there, or whose settings are not those of `spec`; read no weights.

    Raises:
        ConfigError: of both.
    """
    if not (config.lora and config.lora.start_from):
        return
    start = config.lora.start_from
    if not Path(start).exists():
        raise ConfigError(
            f"lora.start_from: {start}: not found; expected an adapter's folder, or a run's that made one"
        )
    try:
        _check_start(resolve(start, adapter=True), spec)
    except CheckpointError as error:
        raise ConfigError(f"lora.start_from: {error}") from None


def initial_states(config: TrainConfig, spec: ModelSpec, folder: Path) -> LayerStates:
    """Open the weights of a run's layers: those of `folder`, a model or a checkpoint, or fresh ones."""
    if config.from_scratch:
        return SeededStates(spec, config.seed)
    origin = folder if config.lora is None else find_model(config.model_path)
    language = spec.language
    if language and is_own_checkpoint(spec, origin):
        language = None
    given = open_source(origin, language or spec.base)
    base = (spec.fresh or NewScores)(given, spec.base, config.seed) if language else given
    if config.lora is None:
        return base
    if (folder / ADAPTER).is_file():
        return AdaptedStates(base, spec, LayerFiles(folder))
    if config.lora.start_from is None:
        return AdaptedStates(base, spec, None, config.seed)
    start = resolve(config.lora.start_from, adapter=True)
    _check_origin(start, origin, spec, digests_folder(config.cache_dir))
    _check_start(start, spec)
    if spec.labels and (known := labels_of_adapter(start)):
        check_labels(spec.labels, known, start)
    return AdaptedStates(base, spec, open_factors(start, spec))


def is_own_checkpoint(spec: ModelSpec, folder: Path) -> bool:
    """Return whether a folder holds what a model has beyond its language model: a checkpoint of this run."""
    if spec.labels:
        return bool(labels_of(read_json(folder / "config.json")))
    assert spec.language
    return ahead_in_layers(folder, spec.language) is not None


def as_stored(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return a base as its folder has it, by which an adapter knows it again."""
    plain = spec.language or spec.plain
    return spec.base if ahead_in_layers(folder, plain) or eyes_in_layers(folder) else plain


def in_checkpoint(spec: ModelSpec) -> ModelSpec:
    """Return a model as its checkpoints have it.

    An adapter's has no layer's weights: a tower without adapters lies in it as tensors of no layer.
    """
    return spec.blind if spec.trained.lora and not spec.trained.lora.beside else spec


def adapter_file(spec: ModelSpec, base: Path, notes: Path | None = None) -> dict[str, bytes]:
    """Make the file that names an adapter's settings and its base, for a checkpoint."""
    source = open_source(base, as_stored(spec, base))
    settings = peft_config(in_checkpoint(spec), str(base.resolve())) | {DIGEST: model_digest(source, notes)}
    if spec.family.sees and spec.trained.lora:
        settings |= {SAW: eyes_digest(_seen(spec, base), notes), "adapted_beside": spec.trained.lora.beside}
    return {ADAPTER: (json.dumps(settings, indent=1) + "\n").encode()}


def check_same_model(spec: ModelSpec, folder: Path) -> None:
    """Raise a ConfigError where a model's config.json is not the one that a checkpoint was trained with."""
    then, now = model_fields(folder / "config.json")[0], spec.raw
    for key in sorted((then.keys() | now.keys()) - UNUSED):
        if then.get(key) != now.get(key):
            raise differs(f"model_path: config.json: {key}", now.get(key), then.get(key), folder)


def check_same_base(adapter: Path, base: Path, spec: ModelSpec, notes: Path) -> None:
    """Refuse another base than the one that an adapter was trained on.

    Raises:
        ConfigError: the weights or the config differ.
    """
    try:
        _check_origin(adapter, base, spec, notes)
    except CheckpointError as error:
        raise ConfigError(f"model_path: {error}, or another save_path") from None


def _check_origin(adapter: Path, base: Path, spec: ModelSpec, notes: Path) -> None:
    check_base(adapter, open_source(base, as_stored(spec, base)), notes)
    if spec.family.sees:
        check_eyes(adapter, _seen(spec, base), notes)


def _seen(spec: ModelSpec, folder: Path) -> PipelineSource | HuggingFaceSource:
    """Open a base with its tower, but without the layers ahead that it may not have."""
    return open_source(folder, replace(spec.base, family=replace(spec.family, ahead=None), _shapes={}))


def check_names(trained: ModelSpec) -> None:
    """Raise a ConfigError where a name or a pattern matches nothing, or nothing is left to train."""
    spec = trained.base
    layers = range(spec.n_layers)
    names: list[str] = []
    for layer in layers:
        names += chain.from_iterable(spec.paths(layer, name) for name in spec.shapes(layer))
    lora, adapted = trained.trained.lora, list(chain(*adapted_paths(trained)))
    if lora is None:
        for pattern in trained.trained.freeze:
            if not any(re.search(pattern, name) for name in names):
                beside = " (vision.train is for what sees images)" if spec.is_part else ""
                raise ConfigError(f"freeze: {pattern!r} matches no weight; expected patterns for {few(names)}{beside}")
        if not any(trained.trained_names(layer) for layer in layers):
            raise ConfigError("freeze: matches all weights; expected some to train")
        return
    possible = chain(*adapted_paths(spec.training(Trained(Lora(r=1, beside=lora.beside)))))
    ends = dict.fromkeys(path.rpartition(".")[2] for path in possible)
    unmatched = [] if adapted else [lora.targets]
    if not isinstance(lora.targets, str):
        unmatched = [target for target in lora.targets if not any(ends_with(path, (target,)) for path in adapted)]
    if unmatched:
        raise ConfigError(
            f"lora.targets: {unmatched[0]!r} matches no layer of this model; expected some of {few(ends)}"
        )
    for module in lora.modules_to_save:
        if not any(ends_with(name.rpartition(".")[0], (module,)) for name in names):
            ends = dict.fromkeys(name.split(".")[-2] for name in names if "." in name)
            raise ConfigError(f"lora.modules_to_save: no module {module!r}; expected some of {few(ends)}")


def _check_start(start: Path, spec: ModelSpec) -> None:
    """Refuse an adapter whose numbers would mean another model with the config's settings."""
    other, differ = with_adapter(spec, start), set[str]()
    for layer in range(spec.n_layers):
        differ |= {*spec.trained_names(layer)} ^ {*other.trained_names(layer)}
    differ -= {HEAD_WEIGHT} if spec.labels else set()  # which a language model's adapter has none of
    if seen := sorted(name for name in differ if name.startswith(f"{EYES}.")):
        what = f"the adapter in {start} (lora.start_from) adapts other parts of the tower of images: {seen[0]}"
        raise ConfigError(f"lora.targets: {what}; expected the targets, and vision.train, that it was trained with")
    adapted, own, given = set(filter(is_factor, differ)), spec.trained.lora, other.trained.lora
    equal = {key: getattr(own, key) == getattr(given, key) for key in ("r", "alpha", "rslora")}
    equal |= {"targets": not adapted, "modules_to_save": adapted == differ}

    for key in [each for each, same in equal.items() if not same]:
        value, wanted = (json.dumps(getattr(each, key)) for each in (own, given))
        what = f"{value}, but the adapter in {start} (lora.start_from) has {wanted}"
        experts = f", experts: {json.dumps(given and given.experts)}" if key == "targets" and spec.has_experts else ""
        raise ConfigError(f"lora.{key}: {what}; expected {key}: {wanted}{experts}")


def _check_base(spec: ModelSpec, config: TrainConfig) -> None:
    base, stored = config.lora and config.lora.base, (spec.raw.get(QUANTIZATION) or {}).get("quant_method")
    if base == FP8 and stored != FP8:
        raise ConfigError(
            f"lora.base: fp8, but {config.model_path} does not store its weights in fp8; expected nf4, or no lora.base"
        )
    if base == NF4 and importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(f"lora.base: {PACKAGE} is not installed; expected pip install {PACKAGE}")
    if not any(spec.packed_names(layer) for layer in range(spec.n_layers)):
        raise ConfigError(
            f"lora.base: {spec.family.name} has none of torch's linear layers, which it packs; expected none"
        )
    if spec.has_experts and config.use_grad_ckpt is not True:
        raise ConfigError(
            "lora.base: experts in 4 or 8 bits are widened for each pass, and kept so until the backward pass where "
            "blocks do not recompute; expected use_grad_ckpt: true"
        )
