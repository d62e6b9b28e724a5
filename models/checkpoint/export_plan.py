"""What an export will write: which tensors, of which dtype, in which files."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from models.checkpoint.layout import CARRIED, MANIFEST, Manifest
from models.checkpoint.safetensors_files import DTYPES, TensorInfo
from models.checkpoint.source import PipelineSource
from models.errors import CheckpointError
from models.weight_map import WeightMap

SINGLE_FILE = "model.safetensors"

Infos = dict[str, TensorInfo]  # by name on disk
Files = dict[str, list[str]]  # file name -> its tensors, in order


def original_infos(
    source: PipelineSource, weight_map: WeightMap, manifest: Manifest | None, carried: Mapping[str, TensorInfo]
) -> Infos:
    """Every tensor of the folder that the layers came from, layer by layer.

    The manifest's dtypes count: a run may have trained in another one. Layers without a manifest, which another tool
    wrote, keep their own, and a tied head stays out.

    Raises:
        CheckpointError: the manifest does not fit the layers that there are.
    """
    spec = source.spec
    infos: Infos = {}
    for layer in range(spec.n_layers):
        stored = source.infos(layer)
        shapes = {name: info.shape for name, info in stored.items()}
        for binding in weight_map.bindings(layer, shapes):
            dtype = stored[binding.names[0]].dtype
            infos |= {name: TensorInfo(dtype, shape) for name, shape in binding.disk_shapes(shapes).items()}
    infos |= carried
    spare = {weight_map.tied_head} if spec.tied else set()
    if manifest is None:
        return {name: info for name, info in infos.items() if name not in spare}
    path = source.folder / MANIFEST
    listed = [name for names in manifest.files.values() for name in names]
    names = set(listed)
    if len(listed) > len(names):
        raise CheckpointError(f"{path}: lists {next(name for name in listed if listed.count(name) > 1)} twice")
    if unknown := names - infos.keys():
        raise CheckpointError(f"{path}: lists {min(unknown)}, which neither a layer nor {CARRIED} holds")
    if spec.tied and weight_map.tied_head in names:
        spare = {weight_map.tied_embedding}  # which some store as the head alone
    if forgotten := infos.keys() - names - spare:
        raise CheckpointError(f"{path}: does not list {min(forgotten)}, which the model has")
    for name in sorted(names):
        if manifest.dtypes.get(name) not in DTYPES:
            raise CheckpointError(f"{path}: dtype of {name}: expected one of {', '.join(DTYPES)}")
    return {
        name: TensorInfo(DTYPES[manifest.dtypes[name]], info.shape) for name, info in infos.items() if name in names
    }


def native_infos(source: PipelineSource, original: WeightMap, native: WeightMap, infos: Infos) -> Infos:
    """The tensors under the names of the native layout, each with the dtype of the original it comes from."""
    renamed: Infos = {}
    for layer in range(source.spec.n_layers):
        shapes = source.spec.shapes(layer)
        for binding in native.bindings(layer, shapes):
            stored_as = original.binding_of(layer, binding.names[0]).disk[0]
            if stored_as in infos:
                dtype = infos[stored_as].dtype
                renamed |= {name: TensorInfo(dtype, shape) for name, shape in binding.disk_shapes(shapes).items()}
    return renamed


def cast(infos: Infos, dtype: torch.dtype, exceptions: Mapping[str, object]) -> Infos:
    """The same tensors in another dtype; integers and carried tensors stay as they are."""
    return {
        name: TensorInfo(dtype, info.shape) if info.dtype.is_floating_point and name not in exceptions else info
        for name, info in infos.items()
    }


def divide(infos: Infos, max_shard_bytes: int) -> Files:
    """Files of which none is larger than asked unless one tensor alone is."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if filled and filled + info.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        filled += info.nbytes
        shards[-1].append(name)
    return _numbered(shards)


def cut_between(files: Files, writers: Mapping[str, int]) -> Files:
    """The same division, but a file that several of the tensors' writers would share is cut into one for each."""
    pieces = []
    for names in files.values():
        its_writers = sorted({writers[name] for name in names})
        pieces += [[name for name in names if writers[name] == writer] for writer in its_writers]
    return files if pieces == list(files.values()) else _numbered(pieces)


def _numbered(shards: list[list[str]]) -> Files:
    """Under the names that transformers gives."""
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    count = len(shards)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": names for number, names in enumerate(shards, start=1)}
