"""Read a model's weights layer by layer from a folder of either layout.

A source reads one layer at a time, under the names of the layer's module, so a converter holds one layer and a training
rank reads only its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.whole_files import sync
from models.adapters import IDLE
from models.checkpoint.layout import CARRIED, Layout, layer_file, layout_of, weight_files, weight_index
from models.checkpoint.quantized import quantized_tensors, without_parts
from models.checkpoint.tensor_files import MappedFile, SafetensorsFile, TensorInfo
from models.checkpoint.tensor_io import in_parallel, write_behind
from models.config_json import QUANTIZATION, TIED
from models.errors import CheckpointError
from models.family import EYES, HEAD_WEIGHT
from models.quantized_base import Fp8
from models.spec import ModelSpec
from models.weight_map import Binding, reshape_rows

TensorFile = SafetensorsFile | MappedFile  # named tensors, mapped when they are read; KeyError for other names


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
        stored: its name there.
    """

    file: TensorFile
    stored: str


class PipelineSource:
    """A pipeline-layout folder: one file a layer.

    A tower of images lies in the first layer where a run saw some. `hg_to_pp`, and a run on text alone, leave it beside
    the layers, with what belongs to none of them; whoever reads the model with eyes finds it in either place.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder = folder
        self.spec = spec

    def check_layer(self, layer: int) -> None:
        """Compare names and shapes with the spec, reading no weights; CheckpointError where they differ."""
        self._open(layer)

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        """Read a layer's state dict, checked; its tensors are mapped, not yet read."""
        found = self._open(layer)
        return {name: found[name].file.read(found[name].stored) for name in self.spec.shapes(layer)}

    def describe(self, layer: int, name: str) -> str:
        """Name a tensor's file for a message."""
        return f"{self.folder / layer_file(layer)}: {name}"

    def infos(self, layer: int) -> dict[str, TensorInfo]:
        """Get the stored dtype and shape of each tensor of a layer."""
        found = self._open(layer)
        return {name: found[name].file.info(found[name].stored) for name in self.spec.shapes(layer)}

    def dtype(self) -> torch.dtype:
        """Get the stored dtype of the embedding."""
        return next(iter(self.infos(0).values())).dtype

    def _open(self, layer: int) -> dict[str, Place]:
        path, shapes = self.folder / layer_file(layer), self.spec.shapes(layer)
        file = MappedFile(path)
        found = {name: Place(file, name) for name in file if name != IDLE}  # which earlier versions wrote
        eyes = [name for name in shapes if name.startswith(f"{EYES}.")]
        if eyes and not found.keys() & set(eyes) and (self.folder / CARRIED).is_file():
            found |= self._beside(eyes)
        _check_names(path, set(found), set(shapes), f"in layer {layer}")
        for name, shape in shapes.items():
            _check_shape(path, name, found[name].file.info(found[name].stored).shape, shape)
        return found

    def _beside(self, eyes: list[str]) -> dict[str, Place]:
        """Find the weights of a tower beside the layers, where they have their names on disk."""
        file = SafetensorsFile(self.folder / CARRIED)
        bindings = self.spec.weight_map.for_names(file).bindings(0, eyes)
        return {each.names[0]: Place(file, each.disk[0]) for each in bindings if each.disk[0] in file}


class HuggingFaceSource:
    """A HuggingFace folder, single or sharded."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder = folder
        self.spec = spec
        self._open: dict[str, TensorFile] = {}

        stored = self._list_files()
        self._file_of: dict[str, str] = {}
        for file, names in stored.items():
            self._file_of.update(dict.fromkeys(names, file))
        self._quantized = quantized_tensors(spec.raw, self._file_of, folder)
        # The names of each file's tensors; a quantized one has a single name.
        self.files = {file: without_parts(names, self._quantized) for file, names in stored.items()}
        for name, each in self._quantized.items():
            self._file_of[name] = self._file_of[each.numbers]
        self.names = set(chain.from_iterable(self.files.values()))

        self.weight_map = spec.weight_map.for_names(self.names)  # in this folder's spelling
        expected = {*self._names_on_disk(tied=False)}
        self._ends = [self.weight_map.tied_embedding, self.weight_map.tied_head]
        # Which of a tied weight's two names is stored, where only one is; mostly the embedding's.
        self._shared = next((name for name in self._ends if name in self.names), self._ends[0])
        optional = set(self._ends) - self.names - {self._shared} if spec.tied else set()
        if not spec.tied and expected - self.names == {head := self._ends[1]}:
            what = f"expected {TIED}: true in config.json where the head is the embedding"
            raise CheckpointError(f"{folder}: missing weights: {head}; {what}")

        # Names that belong to no layer, but have to be in an export.
        self.carried = sorted(name for name in self.names - expected if self.weight_map.is_carried(name))
        _check_names(folder, self.names - set(self.carried), expected - optional, f"for {spec.family.name}")

    def check_layer(self, layer: int) -> None:
        self._check_shapes(layer)
        self._release()

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        self._check_shapes(layer)
        shapes = self.spec.shapes(layer)
        state: dict[str, Tensor] = {}
        for binding in self._bindings(layer):
            wanted = [shapes[name] for name in binding.names]
            pieces = reshape_rows([self.read(name) for name in binding.disk], wanted, binding.groups)
            state |= dict(zip(binding.names, pieces, strict=True))
        if layer == self.weight_map.head_layer and self.spec.tied:
            self._check_repeated_head(state[HEAD_WEIGHT])
        self._release()
        return {name: state[name] for name in shapes}

    def read_fp8(self, layer: int) -> dict[str, tuple[Tensor, Fp8]]:
        """Read the weights of a layer that are stored in fp8 as they are, under the names of the layer."""
        shapes, state = self.spec.shapes(layer), dict[str, tuple[Tensor, Fp8]]()
        for binding in self._bindings(layer):
            stored = [self._quantized.get(name) for name in binding.disk]
            parts = [each.read_fp8(lambda name: self._find(name).read(name)) for each in stored if each and each.block]
            if len(parts) < len(stored) or parts[0][0].dtype != torch.float8_e4m3fn:
                continue
            wanted = [shapes[name] for name in binding.names]
            numbers = reshape_rows([part[0].view(torch.uint8) for part in parts], wanted, binding.groups)
            grids = [torch.Size((*shape[:-1], parts[0][1].shape[-1])) for shape in wanted]
            scales = reshape_rows([part[1] for part in parts], grids, binding.groups)
            for name, own, factors in zip(binding.names, numbers, scales, strict=True):
                state[name] = own, Fp8(factors, parts[0][2], self.info(binding.disk[0]).dtype)
        self._release()
        return state

    def describe(self, layer: int, name: str) -> str:
        return f"{self.folder}: {first_few(self.weight_map.binding_of(layer, name).disk, most=1)}"

    def size(self) -> int:
        """Count the bytes of all weights as they are stored."""
        return sum(self.info(name).nbytes for name in self._names_on_disk())

    def info(self, disk_name: str) -> TensorInfo:
        """Get dtype and shape of a tensor by its name on disk, as it is read."""
        if each := self._quantized.get(disk_name):
            return each.info(*(self._find(name).info(name) for name in (each.numbers, each.scales)))
        return self._find(disk_name).info(disk_name)

    def read(self, disk_name: str) -> Tensor:
        """Read a tensor by its name on disk."""
        if each := self._quantized.get(disk_name):
            return each.read(lambda name: self._find(name).read(name))
        return self._find(disk_name).read(disk_name)

    def dtype(self) -> torch.dtype:
        return self.info(self._shared).dtype

    def _bindings(self, layer: int, tied: bool = True) -> list[Binding]:
        """Get the bindings of a layer; if `tied`, both ends read the one stored weight."""
        bindings = self.weight_map.bindings(layer, self.spec.shapes(layer))
        if not (tied and self.spec.tied):
            return bindings
        return [
            binding._replace(disk=(self._shared,)) if binding.disk[0] in self._ends else binding for binding in bindings
        ]

    def _names_on_disk(self, tied: bool = True) -> Iterator[str]:
        """List the stored names of all layers' weights; if `tied`, both ends have the one stored weight."""
        for layer in range(self.spec.n_layers):
            for binding in self._bindings(layer, tied):
                yield from binding.disk

    def _check_shapes(self, layer: int) -> None:
        for binding in self._bindings(layer):
            for name, shape in binding.disk_shapes(self.spec.shapes(layer)).items():
                info = self.info(name)
                _check_shape(self.folder, name, info.shape, shape)
                if info.dtype.itemsize < 2 and (QUANTIZATION in self.spec.raw or not info.dtype.is_floating_point):
                    raise CheckpointError(f"{self.folder}: {name} has 8 bits and no scales; expected 16 or 32 bits")

    def _find(self, disk_name: str) -> TensorFile:
        file = self._file_of[disk_name]
        if file not in self._open:
            self._open[file] = _open_tensors(self.folder / file)
        try:
            self._open[file].info(disk_name)
        except KeyError:
            raise CheckpointError(f"{self.folder / file}: no tensor {disk_name}, but the index lists it") from None
        return self._open[file]

    def _release(self) -> None:
        """Drop mapped files, whose touched pages count as memory."""
        self._open = {file: opened for file, opened in self._open.items() if isinstance(opened, SafetensorsFile)}

    def _check_repeated_head(self, embedding: Tensor) -> None:
        """Refuse a tied checkpoint whose head is not its embedding."""
        name = self.weight_map.tied_head
        if name in self.names and not same_bytes(self.read(name), embedding):
            problem = f"{self.folder}: {name} is not the embedding, but config.json says {TIED}"
            raise CheckpointError(f"{problem}; expected equal tensors or {TIED}: false")

    def _list_files(self) -> dict[str, list[str]]:
        index = weight_index(self.folder)
        if index is None:
            where: dict[str, str] = {}
            for path in weight_files(self.folder):
                self._open[path.name] = _open_tensors(path)
                for name in self._open[path.name]:
                    if (other := where.setdefault(name, path.name)) != path.name:
                        raise CheckpointError(f"{path}: {name} lies in {other} too, and no index says which counts")
            return {file: list(opened) for file, opened in self._open.items()}

        files: dict[str, list[str]] = {}
        for name, file in index.items():
            files.setdefault(file, []).append(name)
        for file, names in files.items():
            if not (self.folder / file).is_file():
                raise CheckpointError(f"{self.folder / file}: not found, but the index lists it; a shard is missing")
            # Computed, not trained: cleaned checkpoints lack these, though their index still lists them.
            if computed := {name for name in names if name.endswith(".inv_freq")}:
                self._open[file] = _open_tensors(self.folder / file)
                gone = computed - set(self._open[file])
                files[file] = [name for name in names if name not in gone]
        return dict(sorted(files.items()))


def open_source(folder: Path, spec: ModelSpec) -> PipelineSource | HuggingFaceSource:
    """Open a resolved folder of either layout."""
    if layout_of(folder) is Layout.PIPELINE:
        return PipelineSource(folder, spec)
    return HuggingFaceSource(folder, spec)


def _open_tensors(path: Path) -> TensorFile:
    if not path.is_file():
        raise CheckpointError(f"{path}: not found; the folder is incomplete")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else MappedFile(path)


def first_few(names: Iterable[str], most: int = 5) -> str:
    """Join a few names, with how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _check_names(where: Path, found: set[str], expected: set[str], what: str) -> None:
    if unexpected := found - expected:
        raise CheckpointError(f"{where}: unexpected weights {what}: {first_few(sorted(unexpected))}")
    if missing := expected - found:
        raise CheckpointError(f"{where}: missing weights: {first_few(sorted(missing))}")


def _check_shape(where: Path, name: str, found: torch.Size, expected: torch.Size) -> None:
    if found != expected:
        raise CheckpointError(f"{where}: {name} has shape {list(found)}, but config.json makes it {list(expected)}")


logger = logging.getLogger("pipetune")


def warn_of_nan(state: Mapping[str, Tensor], describe: Callable[[str], str]) -> None:
    """Log a warning for each weight that holds NaN."""
    for name, found in zip(state, in_parallel(_has_nan, state.values()), strict=True):
        if found:
            logger.warning("warning: %s holds NaN: every loss of a model with this weight would be NaN", describe(name))


def _has_nan(tensor: Tensor) -> bool:
    """Test whether a tensor holds NaN; a sum is the fastest check."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.to(torch.float16)  # torch adds up no eight bits
    return tensor.is_floating_point() and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def check_range(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse numbers too large for the dtype to write."""
    if not (dtype.is_floating_point and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max):
        return
    if bool((tensor.to(dtype).isinf() & tensor.isfinite()).any()):
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{name}: holds numbers that are too large for {kind}; expected --dtype bf16 or fp32")


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Test whether two tensors have the same dtype and bits; NaN equals NaN."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.reshape(-1).contiguous().view(torch.uint8), other.reshape(-1).contiguous().view(torch.uint8)
    )


def compare_bytes(path: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> int:
    """Compare tensors bit for bit; return the bytes compared."""
    for name, tensor in expected.items():
        if not same_bytes(found[name], tensor):
            raise CheckpointError(f"{path.name}: {name} was read back otherwise than written; nothing was changed")
    return sum(tensor.nbytes for tensor in expected.values())


def forget_cached(path: Path) -> None:
    """Sync a file and drop its cached pages, so that the next read comes from the disk."""
    sync(path)
    write_behind(path)
