"""HuggingFace layout <-> pipeline layout, one layer at a time.

Both directions stream: at most one layer is in memory, and the target folder appears whole or not at all. Every tensor
comes back bit for bit under its own name and dtype, in the file it came from; tokenizer and config files byte for byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from models.architectures import Slot, WeightMap
from models.checkpoint.layout import (
    CARRIED,
    MANIFEST,
    Layout,
    Manifest,
    has_huggingface_weights,
    layer_file,
    layout_of,
    resolve,
    side_files,
)
from models.checkpoint.publish import publish_folder
from models.checkpoint.safetensors_writer import DTYPE_NAMES, DTYPES, SafetensorsWriter, TensorInfo
from models.checkpoint.source import HuggingFaceSource, PipelineSource
from models.checkpoint.tensor_files import open_tensors, save_state_dict
from models.errors import CheckpointError
from models.spec import ModelSpec

MAX_SHARD_BYTES = 5 * 10**9
SINGLE_FILE = "model.safetensors"


def hg_to_pp(input_path: str | Path, save_path: str | Path, overwrite: bool = False) -> None:
    """Write the pipeline layout of a HuggingFace folder.

    Raises:
        CheckpointError: the input is damaged or unknown, or the target cannot be written.
    """
    folder = resolve(input_path)
    if layout_of(folder) is not Layout.HUGGINGFACE:
        raise CheckpointError(f"{folder}: already in the pipeline layout; hg_to_pp expects a HuggingFace folder")
    spec = ModelSpec.from_folder(folder)
    source = HuggingFaceSource(folder, spec)
    with publish_folder(Path(save_path), overwrite) as target:
        dtypes: dict[str, str] = {}
        for layer in tqdm(range(spec.n_layers), desc="hg_to_pp", unit="layer"):
            state = source.read_layer(layer)
            for name, tensor in state.items():
                dtypes[source.weight_map.disk_name(Slot(layer, name))] = DTYPE_NAMES[tensor.dtype]
            save_state_dict(state, target / layer_file(layer))
        _write_carried(source, target, dtypes)
        manifest = _manifest_of(source, dtypes)
        copy_files(folder, target, manifest.side_files)
        manifest.write(target)


def pp_to_hg(input_path: str | Path, save_path: str | Path, overwrite: bool = False) -> None:
    """Write the HuggingFace folder of a pipeline-layout folder or of a run's checkpoint, as safetensors.

    The names, dtypes and division into files are those of the folder that the layout once came from; where another tool
    wrote the layers, the family's names, the layers' dtype and shards of at most 5 GB.

    Raises:
        CheckpointError: the input is damaged or unknown, or the target cannot be written.
    """
    folder = resolve(input_path)
    if layout_of(folder) is not Layout.PIPELINE:
        raise CheckpointError(f"{folder}: not in the pipeline layout; pp_to_hg expects layer_*-model_states.pt files")
    spec = ModelSpec.from_folder(folder)
    source = PipelineSource(folder, spec)
    carried = open_tensors(folder / CARRIED) if (folder / CARRIED).is_file() else {}
    manifest = Manifest.read(folder) or _default_manifest(source, folder, carried)
    weight_map = spec.weight_map.for_names(manifest.dtypes)
    infos = _tensor_infos(source, weight_map, manifest, carried)
    with publish_folder(Path(save_path), overwrite) as target:
        with SafetensorsWriter(target, manifest.files, infos) as writer:
            for name, tensor in tqdm(
                _tensors_on_disk(source, weight_map, infos), desc="pp_to_hg", unit="tensor", total=len(infos)
            ):
                writer.write(name, tensor)
            for name in carried:
                writer.write(name, carried[name])
        copy_files(folder, target, manifest.side_files)
        if list(manifest.files) != [SINGLE_FILE]:
            _write_index(target, manifest, infos)


def copy_files(source: Path, target: Path, names: list[str]) -> None:
    """Copy files byte for byte.

    Raises:
        CheckpointError: one is missing.
    """
    for name in names:
        try:
            shutil.copyfile(source / name, target / name)
        except FileNotFoundError:
            raise CheckpointError(f"{source / name}: not found; the folder is incomplete") from None


def copy_side_files(source: Path, target: Path) -> None:
    """Make a folder of freshly trained layer files a complete pipeline folder: config, tokenizer, manifest, carried.

    Args:
        source: the folder, of either layout, that the training started from; from scratch it needs no weights.
        target: the checkpoint's folder.
    """
    manifest = Manifest.read(source)
    if manifest is None and has_huggingface_weights(source):
        weights = HuggingFaceSource(source, ModelSpec.from_folder(source))
        dtypes = {name: DTYPE_NAMES[weights.read(name).dtype] for names in weights.files.values() for name in names}
        _write_carried(weights, target, dtypes)
        manifest = _manifest_of(weights, dtypes)
    elif (source / CARRIED).is_file():
        copy_files(source, target, [CARRIED])
    copy_files(source, target, manifest.side_files if manifest else [path.name for path in side_files(source)])
    if manifest:
        manifest.write(target)


def _manifest_of(source: HuggingFaceSource, dtypes: dict[str, str]) -> Manifest:
    files = {_safetensors_name(file): names for file, names in source.files.items()}
    return Manifest(files=files, dtypes=dtypes, side_files=[path.name for path in side_files(source.folder)])


def _tensors_on_disk(
    source: PipelineSource, weight_map: WeightMap, infos: dict[str, TensorInfo]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the layers that belongs on disk, layer by layer, under its name there."""
    for layer in range(source.spec.n_layers):
        for name, tensor in source.read_layer(layer).items():
            disk_name = weight_map.disk_name(Slot(layer, name))
            if disk_name in infos:  # a tied head that the original left out stays out
                yield disk_name, tensor


def _tensor_infos(
    source: PipelineSource, weight_map: WeightMap, manifest: Manifest, carried: Mapping[str, Tensor]
) -> dict[str, TensorInfo]:
    """Dtype and shape of every tensor that the manifest lists, checked against the layers that there are."""
    spec = source.spec
    shapes = {
        weight_map.disk_name(Slot(layer, name)): shape
        for layer in range(spec.n_layers)
        for name, shape in spec.shapes(layer).items()
    }
    shapes |= {name: tensor.shape for name, tensor in carried.items()}
    optional = {weight_map.disk_name(Slot(spec.n_layers - 1, spec.family.tie.head))} if spec.tied else set()
    names = {name for names in manifest.files.values() for name in names}
    path = source.folder / MANIFEST
    if unknown := names - shapes.keys():
        raise CheckpointError(f"{path}: lists {min(unknown)}, which neither a layer nor {CARRIED} holds")
    if forgotten := shapes.keys() - names - optional:
        raise CheckpointError(f"{path}: does not list {min(forgotten)}, which the model has")
    for name in names:
        if manifest.dtypes.get(name) not in DTYPES:
            raise CheckpointError(f"{path}: dtype of {name}: expected one of {', '.join(DTYPES)}")
    return {name: TensorInfo(DTYPES[manifest.dtypes[name]], shapes[name]) for name in names}


def _default_manifest(source: PipelineSource, folder: Path, carried: Mapping[str, Tensor]) -> Manifest:
    """The layout for layers that came without a manifest."""
    spec = source.spec
    dtypes: dict[str, str] = {}
    shards: list[list[str]] = [[]]
    filled = 0
    tied_head = Slot(spec.n_layers - 1, spec.family.tie.head) if spec.tied else None
    for layer in range(spec.n_layers):
        for name, tensor in source.read_layer(layer).items():
            slot = Slot(layer, name)
            if slot == tied_head:
                continue
            if filled and filled + tensor.nbytes > MAX_SHARD_BYTES:
                shards.append([])
                filled = 0
            filled += tensor.nbytes
            disk_name = spec.weight_map.disk_name(slot)
            shards[-1].append(disk_name)
            dtypes[disk_name] = DTYPE_NAMES[tensor.dtype]
    for name, tensor in carried.items():
        shards[-1].append(name)
        dtypes[name] = DTYPE_NAMES[tensor.dtype]
    count = len(shards)
    files = (
        {SINGLE_FILE: shards[0]}
        if count == 1
        else {f"model-{number:05d}-of-{count:05d}.safetensors": names for number, names in enumerate(shards, start=1)}
    )
    return Manifest(files=files, dtypes=dtypes, side_files=[path.name for path in side_files(folder)])


def _write_carried(source: HuggingFaceSource, target: Path, dtypes: dict[str, str]) -> None:
    names = source.carried()
    if not names:
        return
    infos = {}
    for name in names:
        tensor = source.read(name)
        infos[name] = TensorInfo(tensor.dtype, tensor.shape)
        dtypes[name] = DTYPE_NAMES[tensor.dtype]
    with SafetensorsWriter(target, {CARRIED: names}, infos) as writer:
        for name in names:
            writer.write(name, source.read(name))


def _write_index(target: Path, manifest: Manifest, infos: dict[str, TensorInfo]) -> None:
    index = {
        "metadata": {"total_size": sum(info.nbytes for info in infos.values())},
        "weight_map": {name: file for file, names in manifest.files.items() for name in names},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (target / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _safetensors_name(file: str) -> str:
    """pytorch_model-00001-of-00002.bin -> model-00001-of-00002.safetensors."""
    if file.endswith(".safetensors"):
        return file
    return file.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"
