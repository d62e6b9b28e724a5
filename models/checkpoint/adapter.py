"""Read and write adapters: a folder of peft's, or the layer files of a run that trains adapters.

Both have peft's `adapter_config.json`, which names the model that the adapter belongs to. A folder of peft's holds
`adapter_model.safetensors`, whose names are those of transformers' model; a run's checkpoint holds layer files with the
weights that are trained, and nothing of the base.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from common.hub import hub_name
from models.adapters import IDLE, base_of, fresh_factors, is_factor, is_transposed, merged
from models.checkpoint.adapter_settings import SAW, read_settings
from models.checkpoint.digest import DIGEST, eyes_digest, model_digest
from models.checkpoint.hub import find_model
from models.checkpoint.layout import ADAPTER, has_huggingface_weights, layer_file
from models.checkpoint.peft_names import PEFT_PREFIX, PEFT_WEIGHTS, WholeNames, from_peft, peft_name
from models.checkpoint.source import HuggingFaceSource, PipelineSource
from models.checkpoint.tensor_files import MappedFile, SafetensorsFile, TensorInfo
from models.config_json import read_json
from models.errors import CheckpointError
from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT
from models.quantized_base import Fp8
from models.scores import LABELS, SCORE, labels_of
from models.spec import ModelSpec

PICKLED = "adapter_model.bin"
EXPECTED = "those of its target_modules, target_parameters and modules_to_save"


def is_peft(folder: Path) -> bool:
    """Return whether a folder holds an adapter as peft saves it; CheckpointError for a pickle of an early peft."""
    found = (folder / PEFT_WEIGHTS).is_file()
    if not found and (folder / PICKLED).is_file():
        raise CheckpointError(f"{folder / PICKLED}: a pickle; expected {PEFT_WEIGHTS}, as peft writes today")
    return found


class Factors(Protocol):
    """Where the trained weights of an adapter come from."""

    def read(self, layer: int, names: list[str]) -> dict[str, Tensor]: ...


class LayerFiles:
    """The trained weights in a checkpoint of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, layer: int, names: list[str]) -> dict[str, Tensor]:
        path = self._folder / layer_file(layer)
        if not (names or path.exists()):  # earlier versions wrote no file then
            return {}
        file = MappedFile(path)
        _check_known(path, set(file), {*names, IDLE})
        return {name: _found(file, name, f"{path}") for name in names}


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
        self._spec, sees = spec, spec.family.sees
        whole = WholeNames(*sees.whole) if sees else None
        self._named = whole.named if whole and whole.are_in(list(self._file)) else peft_name
        known: set[str] = set()
        for layer in range(spec.n_layers):
            known.update(self._named(spec, layer, name) for name in spec.trained_names(layer))
        expected = EXPECTED
        if spec.is_part and not sees:  # names of the whole model mean nothing to its decoder
            expected += "; an adapter of a whole model of images and text is for records with images"
        _check_known(self._path, set(self._file), known, expected)
        self._check_tied()

    def read(self, layer: int, names: list[str]) -> dict[str, Tensor]:
        shapes = self._spec.shapes(layer)
        state = {}
        for name in names:
            tensor = _found(self._file, self._named(self._spec, layer, name), f"{self._path}")
            state[name] = from_peft(name, tensor, shapes[name])
        return state

    def _check_tied(self) -> None:
        """Refuse the ends of a tied model, one weight here, of which the file has one or two."""
        places = (0, EMBEDDING_WEIGHT), (self._spec.n_layers - 1, HEAD_WEIGHT)
        ends = [self._named(self._spec, *place) for place in places]
        here = [self._file.read(name) for name in ends if name in self._file]
        if self._spec.tied and here and not (len(here) == len(ends) and torch.equal(*here)):
            expected = f"{' and '.join(ends)}, with equal numbers"
            raise CheckpointError(f"{self._path}: the model's embedding and head are tied; expected {expected}")


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
                why = "an adapter of this model, of this r" if is_factor(name) else "as in the base (its vocabulary)"
                expected = f"{list(shapes[name])}: {why}"
                raise CheckpointError(f"layer {layer}: {name} has shape {list(tensor.shape)}; expected {expected}")
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
    """Find the model that an adapter belongs to: a folder, or a name on the HuggingFace hub.

    Raises:
        CheckpointError: it is not where it was, or the folder holds a whole model too.
    """
    if has_huggingface_weights(folder):
        raise CheckpointError(f"{folder}: an adapter ({ADAPTER}) beside a whole model; expected one of them")
    settings = read_settings(folder)
    name, revision = settings.base_model_name_or_path or "(none)", settings.revision
    try:
        return find_model(f"{name}@{revision}" if revision and hub_name(name) else name)
    except CheckpointError as error:
        other = "or name the base, and this folder as its adapter (demo.py --model BASE --adapter DIR)"
        what = f"an adapter ({ADAPTER}), no whole model: base_model_name_or_path"
        raise CheckpointError(f"{folder}: {what}: {error}; {other}") from None


def digest_of_base(adapter: Path) -> str:
    """Return what an adapter says of the base that it was trained on; empty where it says nothing that is compared."""
    known = SafetensorsFile(adapter / PEFT_WEIGHTS).metadata if is_peft(adapter) else read_json(adapter / ADAPTER)
    return str(known.get(DIGEST, ""))


def check_base(adapter: Path, base: PipelineSource | HuggingFaceSource, notes: Path | None = None) -> None:
    """Refuse another base than the one that an adapter was trained on, where the adapter says which that was.

    Args:
        notes: see `model_digest`.

    Raises:
        CheckpointError: the weights or the config differ.
    """
    settings = read_json(adapter / ADAPTER)
    expected = digest_of_base(adapter)
    if not expected:
        return

    found = model_digest(base, notes)
    if found != expected:
        what = "config" if found.partition("-")[0] == expected.partition("-")[0] else "weights"
        raise CheckpointError(
            f"{base.folder}: not the {what} that the adapter in {adapter} was trained on; expected those of "
            f"{settings.get('base_model_name_or_path')}"
        )


def check_eyes(adapter: Path, base: PipelineSource | HuggingFaceSource, notes: Path | None = None) -> None:
    """Refuse another tower of images than the one that an adapter was trained with, where the adapter says which.

    Raises:
        CheckpointError: its weights differ.
    """
    expected = read_json(adapter / ADAPTER).get(SAW)
    if isinstance(expected, str) and eyes_digest(base, notes) != expected:
        what = f"not the tower of images that the adapter in {adapter} was trained with"
        raise CheckpointError(f"{base.folder}: {what}; expected the weights of its own base")


def _check_known(path: Path, found: set[str], known: set[str], expected: str = EXPECTED) -> None:
    if other := sorted(found - known):
        raise CheckpointError(f"{path}: {other[0]}: not a weight that {ADAPTER} names; expected {expected}")


def _found(file: MappedFile | SafetensorsFile, name: str, where: str) -> Tensor:
    try:
        found = file.read(name)
    except KeyError:
        raise CheckpointError(f"{where}: no {name}; expected all weights that this adapter trains") from None
    if not bool(found.isfinite().all()):
        raise CheckpointError(f"{where}: {name} holds NaN or infinite numbers; expected none")
    return found
