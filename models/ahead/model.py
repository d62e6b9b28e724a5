"""A model with layers that predict further ahead: as its checkpoint has them, or new ones of its last block."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.adapters import Trained
from models.ahead.layers import Ahead, last_with_attention
from models.ahead.names import BEHIND_THE_BLOCKS, MODULE, naming_of
from models.checkpoint.layout import Manifest, has_huggingface_weights, layer_file
from models.checkpoint.source import HuggingFaceSource
from models.checkpoint.tensor_files import MappedFile
from models.config_json import count_ahead
from models.errors import CheckpointError
from models.spec import ModelSpec

COUNT = "num_nextn_predict_layers"  # the field of config.json that tells servers of such layers


def stored_ahead(folder: Path, spec: ModelSpec) -> Ahead | None:
    """Find the layers ahead that a model folder of either layout holds, as far as Pipetune knows their names.

    Args:
        spec: of the model without them.
    """
    if has_huggingface_weights(folder):
        names = HuggingFaceSource(folder, spec).names
    elif manifest := Manifest.read(folder):
        names = set(manifest.dtypes)
    else:  # a plan needs config.json alone: the shapes are the same under any name
        count = count_ahead(spec.fields)
        return Ahead(BEHIND_THE_BLOCKS, count) if count else None
    found = naming_of(map(spec.weight_map.for_names(names).in_own_spelling, names), spec.family, spec.n_blocks)
    return Ahead(*found) if found else None


def usable_ahead(folder: Path, spec: ModelSpec) -> Ahead | None:
    """Find the layers ahead that can be a part of a model of this folder; None if it has none.

    Raises:
        CheckpointError: it is a folder of `hg_to_pp`, which keeps them beside the last layer.
    """
    found = spec.family.ahead or stored_ahead(folder, spec)
    if found and not spec.family.ahead and (folder / layer_file(0)).is_file():
        what = "in the pipeline layout, which keeps layers ahead apart"
        raise CheckpointError(f"{folder}: {what}; expected the HuggingFace folder that it was made from")
    return found


def ahead_in_layers(folder: Path, spec: ModelSpec) -> Ahead | None:
    """Find the layers ahead that are a part of a pipeline folder's last layer, as a run that trained them wrote it."""
    path = folder / layer_file(spec.n_layers - 1)
    if not path.is_file():
        return None
    numbers = {name.split(".")[1] for name in MappedFile(path) if name.startswith(f"{MODULE}.")}
    if not numbers:
        return None
    stored = stored_ahead(folder, spec)
    return Ahead(stored.naming if stored else BEHIND_THE_BLOCKS, len(numbers))


def looking_ahead(spec: ModelSpec, ahead: Ahead) -> ModelSpec:
    """Get the same model with layers ahead in its last layer."""
    return replace(spec, family=replace(spec.family, ahead=ahead), _shapes={})


def with_new_layers(spec: ModelSpec, depth: int) -> ModelSpec:
    """Get a model that begins with `depth` new layers ahead, named as most checkpoints name them."""
    raw = spec.raw | {COUNT: depth}
    return replace(looking_ahead(spec, Ahead(BEHIND_THE_BLOCKS, depth)), raw=raw, language=spec, fresh=CopiedLayers)


class CopiedLayers:
    """The weights of a model, with layers ahead made of its last block with attention.

    The norm behind each begins as the final one. The projection adds both halves up, the hidden states times the root
    of their width: blocks are used to states some tens of times as large as a norm makes them. On SmolLM2-135M this
    starts at a loss of 13; with equal halves behind copies of the final norm it is 35.

    Args:
        base: of the model without them.
        spec: of the model with them.
    """

    def __init__(self, base: Any, spec: ModelSpec, seed: int) -> None:
        self._base, self._spec = base, spec
        self._like = 1 + last_with_attention(spec.config)

    def check_layer(self, layer: int) -> None:
        self._base.check_layer(layer)

    def describe(self, layer: int, name: str) -> str:
        return str(self._base.describe(layer, name))

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._base.read_layer(layer)
        if layer != self._spec.n_layers - 1:
            return state
        block: dict[str, Tensor] = self._base.read_layer(self._like)
        for name, shape in self._spec.shapes(layer).items():
            if name.startswith(f"{MODULE}."):
                state[name] = self._new(name.split(".", 2)[2], shape, state, block)
        return state

    def _new(self, name: str, shape: torch.Size, state: dict[str, Tensor], block: dict[str, Tensor]) -> Tensor:
        part, _, rest = name.partition(".")
        if part == "joined":
            identity = torch.eye(shape[0], dtype=next(iter(block.values())).dtype)
            return torch.cat([identity, math.sqrt(shape[0]) * identity], dim=1)
        if part == "decoder":
            return block[rest].clone()
        if part == "norm":
            return state[name].clone()
        fresh: Tensor = self._spec.family.norm(self._spec.config).state_dict()[rest]
        return fresh.to(state[f"norm.{rest}"].dtype)


def ahead_alone(spec: ModelSpec) -> ModelSpec:
    """Get the same model with nothing trained but its layers ahead."""
    ahead = spec.family.ahead
    assert ahead
    begin = (ahead.naming.begin(spec.family, spec.n_blocks, k) for k in range(ahead.depth))
    names = map(re.escape, chain.from_iterable(begin))
    return spec.training(Trained(freeze=(rf"^(?!({'|'.join(names)})\.)",)))
