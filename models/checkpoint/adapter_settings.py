"""Read and write `adapter_config.json`, in which peft names an adapter's settings and its base.

It is read by a list of what is known: every few months peft adds a kind of adapters that only a name in here tells from
plain LoRA.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from transformers.pytorch_utils import Conv1D

from models.adapters import ALL_LINEAR, Lora, Trained, ends_with, is_factor
from models.checkpoint.digest import DIGEST
from models.checkpoint.layout import ADAPTER
from models.checkpoint.peft_names import PEFT_WEIGHTS, WholeNames
from models.checkpoint.tensor_files import SafetensorsFile
from models.config_json import read_json
from models.errors import CheckpointError
from models.family import EMBEDDING_WEIGHT
from models.spec import ModelSpec

SCORES, WORDS = "SEQ_CLS", "CAUSAL_LM"  # peft's task_type
# What changes nothing whatever it says: where an adapter comes from, how it began (`init_lora_weights` decides).
ANY = set("auto_mapping peft_version task_type inference_mode megatron_config megatron_core qalora_group_size".split())
ANY |= {"eva_config", "loftq_config", "corda_config", "lora_ga_config"}
ANY |= {"ensure_weight_tying", "base_checksum", DIGEST}  # compared with the weights themselves
SAW = "saw_images"  # in the checkpoint of a run with images, a digest of its tower: peft then loads the whole model
ANY |= {SAW}
ANY |= {"fan_in_fan_out"}  # peft looks at the layer itself
WHERE = {"exclude_modules", "layers_to_transform", "layers_pattern"}  # which modules are adapted


class AdapterSettings(BaseModel):
    """What has a meaning here; the descriptions say what was expected in the place of another value."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    peft_type: Literal["LORA"] = Field("LORA", description="LORA")
    base_model_name_or_path: str = Field("", description="the name or the path of its base")
    revision: str = Field("", description="the name of a revision of the base")
    r: PositiveInt = Field(description="a whole number above 0")
    lora_alpha: PositiveFloat = Field(description="a number above 0")
    lora_dropout: float = Field(0.0, ge=0, le=1, description="a number from 0 to 1")
    use_rslora: bool = Field(False, description="true or false")
    target_modules: str | list[str] = Field([], description="a list of names, or a regular expression")
    target_parameters: list[str] = Field([], description="a list of names")
    modules_to_save: list[str] = Field([], description="a list of names")
    adapted_beside: list[str] = Field([], description="beginnings of names")  # of `Lora.beside`, in a run's checkpoint
    bias: Literal["none"] = Field("none", description="none")
    # The others take a part of the base away, which this adapter then needs.
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal", "mica"] = Field(
        True, description="a way to begin that leaves the base as it is: true, false, gaussian, eva, orthogonal or mica"
    )

    @property
    def lora(self) -> Lora:
        modules, whole = self.target_modules, tuple(self.modules_to_save)
        targets = modules if isinstance(modules, str) else (*modules, *self.target_parameters)
        experts = bool(self.target_parameters)
        own = self.r, self.lora_alpha, self.lora_dropout, self.use_rslora
        return Lora(*own, targets, experts, whole, beside=tuple(self.adapted_beside))


def read_settings(folder: Path, known: Set[str] = frozenset()) -> AdapterSettings:
    """Read an adapter's settings.

    Args:
        known: settings that are seen in its weights, and not read here.

    Raises:
        CheckpointError: no such file, or an adapter of a kind that Pipetune does not train.
    """
    path = folder / ADAPTER
    raw = {name: value for name, value in read_json(path).items() if value is not None}
    for name in sorted(raw.keys() - AdapterSettings.model_fields.keys() - ANY - known):
        if raw[name] is not False and raw[name] not in ({}, [], ""):
            raise CheckpointError(f"{path}: {name}: {raw[name]}, but Pipetune trains plain LoRA; expected no {name}")
    try:
        return AdapterSettings.model_validate(raw)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        found = f"{raw[name]!r:.200}" if name in raw else "missing"
        expected = AdapterSettings.model_fields[name].description
        raise CheckpointError(f"{path}: {name}: {found}; expected {expected}") from None


def with_adapter(base: ModelSpec, folder: Path) -> ModelSpec:
    """Get a model with the adapters in a folder; CheckpointError where they are not such as its layers can have."""
    file, sees = folder / PEFT_WEIGHTS, base.family.sees
    names = set(SafetensorsFile(file)) if sees and file.is_file() else set[str]()
    whole = WholeNames(*sees.whole) if sees else None
    of_whole = whole is not None and whole.are_in(names)
    settings = read_settings(folder, WHERE if of_whole else frozenset())
    try:
        lora = settings.lora
        if whole and of_whole:
            lora = whole.lora(base, lora, settings.target_parameters, names)
        spec = base.training(Trained(lora))
        for layer in range(spec.n_layers):
            spec.shapes(layer)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / ADAPTER}: {error}") from None
    return spec


def peft_config(spec: ModelSpec, base: str) -> dict[str, Any]:
    """Write an adapter's settings in peft's words."""
    lora = spec.trained.lora
    assert lora is not None
    modules, weights = adapted_paths(spec)
    return {
        "peft_type": "LORA",
        "task_type": SCORES if spec.labels else WORDS,
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": _targets(lora, modules, 1),
        "target_parameters": _targets(lora, weights, 2) or None,
        "modules_to_save": trained_in_full(spec) or None,
        "ensure_weight_tying": spec.tied and EMBEDDING_WEIGHT in spec.trained_names(0),
        "fan_in_fan_out": _transposes(spec),
        "bias": "none",
        "inference_mode": True,
    }


def adapted_paths(spec: ModelSpec) -> tuple[list[str], list[str]]:
    """List the names in transformers' model of what is adapted: linear layers, and weights of experts."""
    modules, weights = [], []
    for layer in range(spec.n_layers):
        for name in (each for each in spec.shapes(layer) if each.endswith("lora_A")):
            owner, _, leaf = name.rpartition(".")
            path = spec.path(layer, owner)
            if leaf == "lora_A":
                modules.append(path)
            else:
                weights.append(f"{path}.{leaf.removesuffix('_lora_A')}")
    return modules, weights


def _transposes(spec: ModelSpec) -> bool:
    """Return whether the linear layers of blocks have weights [in, out], which peft warns of where it is not told."""
    with torch.device("meta"):
        return any(isinstance(module, Conv1D) for module in spec.build(1).modules())


def trained_in_full(spec: ModelSpec) -> list[str]:
    """List the modules that are trained in full, with both names of a tied one, as peft takes names without a dot."""
    paths = dict[str, None]()
    for layer in range(spec.n_layers):
        for name in (each for each in spec.trained_names(layer) if not is_factor(each)):
            paths |= dict.fromkeys(path.rpartition(".")[0] for path in spec.paths(layer, name))
    return list(paths)


def _targets(lora: Lora, paths: list[str], parts: int) -> str | list[str]:
    """Name what is adapted as peft finds it: in the user's words, or by the last parts of the names."""
    if lora.targets == ALL_LINEAR:
        return list(dict.fromkeys(".".join(path.split(".")[-parts:]) for path in paths))
    if isinstance(lora.targets, str):
        return lora.targets if parts == 1 else paths
    return [each for each in lora.targets if any(ends_with(path, (each,)) for path in paths)]
