"""Read and write adapters: a folder of peft's, or the layer files of a run that trains adapters.

Both have peft's `adapter_config.json`, which names the model that the adapter belongs to. A folder of peft's holds
`adapter_model.safetensors`, whose names are those of transformers' model; a run's checkpoint holds layer files with the
weights that are trained, and nothing of the base.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from models.adapters import ALL_LINEAR, Lora, base_of, ends_with, fresh_factors, is_factor, is_transposed, merged
from models.checkpoint.layout import ADAPTER, has_huggingface_weights, layer_file, resolve
from models.checkpoint.source import HuggingFaceSource, PipelineSource
from models.checkpoint.tensor_files import MappedFile, SafetensorsFile, TensorInfo
from models.config_json import read_json
from models.errors import CheckpointError
from models.quantized_base import Fp8
from models.scores import LABELS, SCORE, labels_of
from models.spec import ModelSpec

PEFT_WEIGHTS = "adapter_model.safetensors"
CHECKSUM = "base_checksum"  # in a checkpoint's ADAPTER, and in the metadata of weights for peft, which it passes over
PEFT_PREFIX = "base_model.model."
SCORES, WORDS = "SEQ_CLS", "CAUSAL_LM"  # peft's task_type
# What peft can do to an adapter beside what Pipetune knows, with the value of each that changes nothing.
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
    "trainable_token_indices": None,
    "exclude_modules": None,
}


def is_peft(folder: Path) -> bool:
    """Return whether a folder holds an adapter as peft saves it."""
    return (folder / PEFT_WEIGHTS).is_file()


class Factors(Protocol):
    """Where the trained weights of an adapter come from."""

    def read(self, layer: int, names: list[str]) -> dict[str, Tensor]: ...


class LayerFiles:
    """The trained weights in a checkpoint of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, layer: int, names: list[str]) -> dict[str, Tensor]:
        if not names:  # earlier versions wrote no file then
            return {}
        file = MappedFile(self._folder / layer_file(layer))
        return {name: _found(file, name, f"{self._folder / layer_file(layer)}") for name in names}


class PeftFolder:
    """The trained weights in a folder that peft wrote, or can read.

    Raises:
        CheckpointError: the folder is none, or its tensors are not those of the model's adapters.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._path = folder / PEFT_WEIGHTS
        if not self._path.is_file():
            raise CheckpointError(f"{self._path}: not found; expected a folder with an adapter as peft saves it")
        self._file = SafetensorsFile(self._path)
        self._spec = spec
        known = {peft_name(spec, layer, name) for layer in range(spec.n_layers) for name in spec.trained_names(layer)}
        if other := sorted(set(self._file) - known):
            raise CheckpointError(f"{self._path}: {other[0]}: not a weight that lora.targets adapts in this model")

    def read(self, layer: int, names: list[str]) -> dict[str, Tensor]:
        shapes = self._spec.shapes(layer)
        state = {}
        for name in names:
            tensor = _found(self._file, peft_name(self._spec, layer, name), f"{self._path}")
            state[name] = from_peft(name, tensor, shapes[name])
        return state


class AdaptedStates:
    """The layers of a model whose adapters are trained: the base, and the trained weights on top of it.

    Args:
        base: the model's own weights.
        spec: of the model with its adapters.
        factors: where the trained weights come from; fresh ones, by `seed`, where absent.
    """

    def __init__(self, base: Any, spec: ModelSpec, factors: Factors | None, seed: int = 0) -> None:
        self._base, self._spec, self._factors, self._seed = base, spec, factors, seed

    def check_layer(self, layer: int) -> None:
        self._base.check_layer(layer)
        if self._factors:
            self._read_trained(layer)

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        read = self._base.read_layer(layer) | self._read_trained(layer)
        return {name: read[name] for name in self._spec.shapes(layer)}  # a language model's head may have more

    def read_fp8(self, layer: int) -> dict[str, tuple[Tensor, Fp8]]:
        """Read the base's weights of a layer that are stored in fp8 as they are."""
        found: dict[str, tuple[Tensor, Fp8]] = self._base.read_fp8(layer)
        return found

    def describe(self, layer: int, name: str) -> str:
        return f"layer {layer}: {name}" if is_factor(name) else str(self._base.describe(layer, name))

    def dtype(self) -> torch.dtype:
        found: torch.dtype = self._base.dtype()
        return found

    def _read_trained(self, layer: int) -> dict[str, Tensor]:
        shapes, names = self._spec.shapes(layer), self._spec.trained_names(layer)
        if self._factors is None:
            return fresh_factors({name: shapes[name] for name in names if is_factor(name)}, self._seed + layer)
        state = self._factors.read(layer, names)
        for name, tensor in state.items():
            if tensor.shape != shapes[name]:
                raise CheckpointError(
                    f"layer {layer}: {name} has shape {list(tensor.shape)}; expected {list(shapes[name])}: an adapter "
                    "of this model, of this r"
                )
        return state


class MergedStates:
    """A model with an adapter added to its weights, under the base's names.

    Args:
        base: the model's own weights.
        spec: of the model with its adapters.
    """

    def __init__(self, base: PipelineSource | HuggingFaceSource, spec: ModelSpec, factors: Factors) -> None:
        self.folder = base.folder
        self.spec = spec.base
        self._adapted = AdaptedStates(base, spec, factors)
        self._with_adapters = spec

    def check_layer(self, layer: int) -> None:
        self._adapted.check_layer(layer)

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        state, lora = self._adapted.read_layer(layer), self._with_adapters.trained.lora
        assert lora is not None
        with torch.device("meta"):
            modules = dict(self._with_adapters.build(layer).named_modules())
        for name in [each for each in state if each.endswith("lora_A")]:
            a, b = state.pop(name), state.pop(f"{name[:-1]}B")
            weight, owner = base_of(name), modules[name.rpartition(".")[0]]
            state[weight] = merged(state[weight], a, b, lora.scale, is_transposed(owner))
        return state

    def infos(self, layer: int) -> dict[str, TensorInfo]:
        """Get the dtype, that of the base's embedding, and the shape of each tensor of a layer."""
        dtype = self._adapted.dtype()
        return {name: TensorInfo(dtype, shape) for name, shape in self.spec.shapes(layer).items()}

    def describe(self, layer: int, name: str) -> str:
        return self._adapted.describe(layer, name)


def open_factors(folder: Path, spec: ModelSpec) -> Factors:
    """Open the trained weights in an adapter's folder of either kind."""
    return PeftFolder(folder, spec) if is_peft(folder) else LayerFiles(folder)


def labels_of_adapter(folder: Path) -> list[str]:
    """List what an adapter's scores stand for: as its run or its export says, else numbered."""
    if not is_peft(folder):
        return labels_of(read_json(folder / "config.json"))
    file, name = SafetensorsFile(folder / PEFT_WEIGHTS), f"{PEFT_PREFIX}{SCORE}.weight"
    if name not in file:
        raise CheckpointError(f"{folder / PEFT_WEIGHTS}: no {name}; expected the head of a model that scores texts")
    known: list[str] = json.loads(file.metadata.get(LABELS, "[]"))
    return known or [f"LABEL_{number}" for number in range(file.info(name).shape[0])]


def base_folder(folder: Path) -> Path:
    """Find the model that an adapter belongs to.

    Raises:
        CheckpointError: it is not where it was, or the folder holds a whole model too.
    """
    found = Path(str(read_json(folder / ADAPTER).get("base_model_name_or_path")))
    if has_huggingface_weights(folder):
        raise CheckpointError(f"{folder}: an adapter ({ADAPTER}) beside a whole model; expected one of them")
    if not found.is_dir():
        raise CheckpointError(
            f"{folder}: an adapter ({ADAPTER}), no whole model, and its base is not at {found}; expected the base, and "
            "this folder as its adapter (demo.py --model BASE --adapter DIR)"
        )
    return resolve(found)


def base_checksum(base: PipelineSource | HuggingFaceSource) -> str:
    """Digest a row of each weight of three blocks: the same in any layout, and in a wider dtype."""
    digest = blake2b(digest_size=8)
    last = base.spec.n_blocks
    for layer in sorted({1, (1 + last) // 2, last}):
        for _, weight in sorted(base.read_layer(layer).items()):
            row = weight[tuple(size // 2 for size in weight.shape[:-1])]
            digest.update(row.double().numpy().tobytes())
    return digest.hexdigest()


def check_base(adapter: Path, base: PipelineSource | HuggingFaceSource) -> None:
    """Refuse another base than the one that an adapter was trained on, where the adapter says which that was.

    Raises:
        CheckpointError: the weights differ.
    """
    settings = read_json(adapter / ADAPTER)
    known = SafetensorsFile(adapter / PEFT_WEIGHTS).metadata if is_peft(adapter) else settings
    if known.get(CHECKSUM, "") not in ("", base_checksum(base)):
        raise CheckpointError(
            f"{base.folder}: not the weights that the adapter in {adapter} was trained on; expected those of "
            f"{settings.get('base_model_name_or_path')}"
        )


def peft_name(spec: ModelSpec, layer: int, name: str) -> str:
    """Name a trained weight as peft does."""
    owner, _, leaf = name.rpartition(".")
    if not is_factor(name):
        return f"{PEFT_PREFIX}{spec.path(layer, name)}"
    factor = leaf[-6:]  # of `gate_up_proj_lora_A`, or all of a linear layer's `lora_A`
    if leaf == factor:
        return f"{PEFT_PREFIX}{spec.path(layer, owner)}.{factor}.weight"
    # peft wraps the module once for each weight, in their order; the last one is the outermost.
    same = [each for each in spec.shapes(layer) if each.startswith(f"{owner}.") and each.endswith(factor)]
    inside = len(same) - 1 - same.index(name)
    return f"{PEFT_PREFIX}{spec.path(layer, owner)}{'.base_layer' * inside}.{factor}.weight"


def to_peft(name: str, tensor: Tensor) -> Tensor:
    """Give a trained weight the shape that it has in peft, which joins the factors of all experts."""
    if not (is_factor(name) and tensor.dim() == 3):
        return tensor
    joined = tensor.flatten(0, 1) if name.endswith("A") else tensor.permute(1, 2, 0).flatten(1)
    return joined.contiguous()


def from_peft(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """Give a tensor of peft's the shape that the weight has here; as it is, where it cannot have it."""
    if not (is_factor(name) and len(shape) == 3) or tensor.numel() != shape.numel():
        return tensor
    experts, rows, columns = shape
    return (
        tensor.view(shape) if name.endswith("A") else tensor.view(rows, columns, experts).permute(2, 0, 1).contiguous()
    )


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
        "modules_to_save": list(lora.modules_to_save) or None,
        "bias": "none",
        "inference_mode": True,
    }


def read_peft_config(folder: Path) -> Lora:
    """Read an adapter's settings.

    Raises:
        CheckpointError: no such file, or an adapter of a kind that Pipetune does not train.
    """
    path = folder / ADAPTER
    raw = read_json(path)
    for name, plain in PLAIN.items():
        if (value := raw.get(name)) not in (plain, None, False, {}, []):
            raise CheckpointError(f"{path}: {name}: {value}; Pipetune trains plain LoRA; expected {plain}")
    try:
        modules, weights = raw.get("target_modules") or [], raw.get("target_parameters") or []
        targets = modules if isinstance(modules, str) else (*modules, *weights)
        return Lora(
            r=raw["r"],
            alpha=raw["lora_alpha"],
            dropout=raw.get("lora_dropout") or 0.0,
            rslora=bool(raw.get("use_rslora")),
            targets=targets,
            experts=bool(weights),
            modules_to_save=tuple(raw.get("modules_to_save") or ()),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: no usable {error}; expected the settings of a LoRA adapter") from None


def _found(file: MappedFile | SafetensorsFile, name: str, where: str) -> Tensor:
    try:
        return file.read(name)
    except KeyError:
        raise CheckpointError(f"{where}: no {name}; expected all weights that this adapter trains") from None


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


def _targets(lora: Lora, paths: list[str], parts: int) -> str | list[str]:
    """Name what is adapted as peft finds it: in the user's words, or by the last parts of the names."""
    if lora.targets == ALL_LINEAR:
        return list(dict.fromkeys(".".join(path.split(".")[-parts:]) for path in paths))
    if isinstance(lora.targets, str):
        return lora.targets if parts == 1 else paths
    return [each for each in lora.targets if any(ends_with(path, (each,)) for path in paths)]
