"""Where a layer's weights come from, whichever layout holds them.

A source gives one layer at a time, under the names of the layer's module, so that a converter holds one layer and a
training rank reads only its own. `open_source` picks the source by what lies in the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from models.architectures import Slot
from models.checkpoint.layout import Layout, layer_file, layout_of, weight_files, weight_index
from models.checkpoint.tensor_files import load_state_dict, open_tensors
from models.errors import CheckpointError
from models.spec import ModelSpec


class WeightSource(Protocol):
    """Anything that can give the weights of one layer."""

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        """The complete state dict of a layer, checked against the spec; tensors on the CPU.

        Raises:
            CheckpointError: a tensor is missing, unexpected or of another shape, or its file is damaged.
        """
        ...

    def dtype(self) -> torch.dtype:
        """The dtype of the embedding as it is stored."""
        ...


class PipelineSource:
    """A pipeline-layout folder: one file a layer."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder = folder
        self.spec = spec

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        path = self.folder / layer_file(layer)
        state = load_state_dict(path)
        check_layer(self.spec, layer, state, str(path), lambda name: name)
        return state

    def dtype(self) -> torch.dtype:
        return next(iter(self.read_layer(0).values())).dtype


class HuggingFaceSource:
    """A HuggingFace folder: a layer's tensors are found through the index, in however many shards they lie.

    Attributes:
        files: file name -> the names on disk of its tensors.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.files = self._list_files()
        self._file_of = {name: file for file, names in self.files.items() for name in names}
        self.weight_map = spec.weight_map.for_names(self._file_of)
        self._open: dict[str, Mapping[str, Tensor]] = {}
        self._names_of_layer = self._sort_into_layers()

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        state = {slot: self.read(name) for slot, name in self._names_of_layer[layer].items()}
        check_layer(
            self.spec, layer, state, str(self.folder), lambda name: self.weight_map.disk_name(Slot(layer, name))
        )
        if layer == self.weight_map.head_layer and self.spec.tied:
            self._check_repeated_head(state[self.spec.family.tie.head])
        return state

    def read(self, disk_name: str) -> Tensor:
        """One tensor by its name on disk."""
        file = self._file_of[disk_name]
        if file not in self._open:
            self._open[file] = open_tensors(self.folder / file)
        try:
            return self._open[file][disk_name]
        except KeyError:
            raise CheckpointError(f"{self.folder / file}: no tensor {disk_name}, which the index promises") from None

    def dtype(self) -> torch.dtype:
        return next(iter(self.read_layer(0).values())).dtype

    def carried(self) -> list[str]:
        """Names on disk of the tensors that belong to no layer but have to come back."""
        return [name for name in self._file_of if self.weight_map.is_carried(name)]

    def _check_repeated_head(self, embedding: Tensor) -> None:
        """A tied checkpoint may repeat the embedding as its head, but not hold another one."""
        name = self.weight_map.disk_name(Slot(self.spec.n_layers - 1, self.spec.family.tie.head))
        if name in self._file_of and not _same_bytes(self.read(name), embedding):
            raise CheckpointError(
                f"{self.folder}: {name} is not the embedding, but config.json says tie_word_embeddings; expected equal "
                "tensors or tie_word_embeddings: false"
            )

    def _list_files(self) -> dict[str, list[str]]:
        index = weight_index(self.folder)
        if index is None:
            return {path.name: list(open_tensors(path)) for path in weight_files(self.folder)}
        files: dict[str, list[str]] = {}
        for name, file in index.items():
            files.setdefault(file, []).append(name)
        for file in files:
            if not (self.folder / file).is_file():
                raise CheckpointError(f"{self.folder / file}: not found, but the index lists it; a shard is missing")
        return dict(sorted(files.items()))

    def _sort_into_layers(self) -> list[dict[str, str]]:
        layers: list[dict[str, str]] = [{} for _ in range(self.spec.n_layers)]
        unexpected = []
        for name in self._file_of:
            slot = self.weight_map.slot(name)
            if self.weight_map.is_carried(name):
                continue
            if slot is None:
                unexpected.append(name)
            else:
                layers[slot.layer][slot.name] = name
        if unexpected:
            raise CheckpointError(
                f"{self.folder}: unexpected weights for {self.spec.family.name}: {_listed(unexpected)}"
            )
        if self.spec.tied:
            # Tied checkpoints leave the head's copy out, or repeat it: the embedding is the one that counts.
            tie = self.spec.family.tie
            if tie.embedding in layers[0]:
                layers[-1][tie.head] = layers[0][tie.embedding]
        return layers


def open_source(folder: Path, spec: ModelSpec) -> PipelineSource | HuggingFaceSource:
    """The source for a resolved folder of either layout."""
    if layout_of(folder) is Layout.PIPELINE:
        return PipelineSource(folder, spec)
    return HuggingFaceSource(folder, spec)


def check_layer(spec: ModelSpec, layer: int, state: Mapping[str, Tensor], where: str, told: NameFor) -> None:
    """Refuse a state dict that is not exactly the layer's.

    Args:
        where: the file or folder, for the message.
        told: turns a name in the layer into the name that the person knows it by.

    Raises:
        CheckpointError: missing or unexpected names, or a shape that does not fit config.json.
    """
    shapes = spec.shapes(layer)
    if missing := shapes.keys() - state.keys():
        raise CheckpointError(f"{where}: missing weights: {_listed(told(name) for name in sorted(missing))}")
    if unexpected := state.keys() - shapes.keys():
        raise CheckpointError(f"{where}: unexpected weights in layer {layer}: {_listed(sorted(unexpected))}")
    for name, shape in shapes.items():
        if state[name].shape != shape:
            found, expected = list(state[name].shape), list(shape)
            raise CheckpointError(f"{where}: {told(name)} has shape {found}, but config.json makes it {expected}")


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


class NameFor(Protocol):
    def __call__(self, name: str, /) -> str: ...


def _listed(names: Iterable[str], most: int = 5) -> str:
    shown = list(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
