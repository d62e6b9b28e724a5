"""Copy the files beside a model's weights: config, tokenizer, templates, and tensors that belong to no layer."""

from __future__ import annotations

import logging
import os
import shutil
from itertools import chain
from pathlib import Path

from models.ahead.names import copies_of
from models.checkpoint import layout
from models.checkpoint.layout import CARRIED, TEMPLATES, Manifest, flat, side_files
from models.checkpoint.source import HuggingFaceSource, same_bytes
from models.checkpoint.tensor_files import DTYPE_NAMES, SafetensorsFile, SafetensorsWriter
from models.config_json import QUANTIZATION, read_json, write_json
from models.errors import CheckpointError
from models.spec import ModelSpec

logger = logging.getLogger("pipetune")


def paths_of(source: Path, names: list[str]) -> dict[str, Path]:
    """Locate a folder's files by name; CheckpointError for a link to somewhere else on this machine."""
    folder = Path(os.path.realpath(source))
    cache = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    paths = {name: source / (flat(name) if (source / flat(name)).exists() else name) for name in names}
    for path in paths.values():
        if Path(os.path.realpath(path)).parent not in (folder, folder / TEMPLATES, cache):
            raise CheckpointError(f"{path}: a link that leads out of the folder; expected the file itself")
    return paths


def copy_files(source: Path, target: Path, names: list[str], in_folders: bool = True) -> None:
    """Copy files byte for byte, also through links into HuggingFace's cache; CheckpointError where one is missing.

    Args:
        in_folders: keep the folders in the names; else all files lie side by side.
    """
    for name, path in paths_of(source, names).items():
        copy = target / (name if in_folders else flat(name))
        copy.parent.mkdir(exist_ok=True)
        try:
            shutil.copyfile(path, copy)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: not found; the folder is incomplete") from None


def copy_side_files(source: Path, target: Path, spec: ModelSpec, in_folders: bool = False) -> None:
    """Complete a folder of layer files: config, tokenizer, manifest, carried tensors.

    Args:
        source: folder of either layout that the layers or the training came from; from scratch it needs no weights.
        in_folders: as `copy_files`; a run's checkpoint has no folders, and other weights than its origin.
    """
    manifest = Manifest.read(source)
    if manifest is None and layout.has_huggingface_weights(source):
        manifest = _write_carried(HuggingFaceSource(source, spec), target)
    elif (source / CARRIED).is_file():
        _copy_carried(source, target, spec)
    copy_files(source, target, side_files(source), in_folders)
    path = target / "config.json"
    if path.is_file() and QUANTIZATION in (config := read_json(path)):  # the weights beside it no longer are
        logger.info("%s: quantized weights are read as what they stand for, and written in 16 or 32 bits", target)
        write_json(path, {name: value for name, value in config.items() if name != QUANTIZATION})
    if manifest:
        manifest.origin = os.path.realpath(source) if in_folders else None
        manifest.write(target)


def _copy_carried(source: Path, target: Path, spec: ModelSpec) -> None:
    """Copy the tensors that belong to no layer, which a tower does where the model sees."""
    if not spec.family.sees:
        copy_files(source, target, [CARRIED])
        return
    file = SafetensorsFile(source / CARRIED)
    weight_map = spec.weight_map.for_names(file)
    _write(target, file, [name for name in file if weight_map.binding(name) is None])


def _write_carried(source: HuggingFaceSource, target: Path) -> Manifest:
    """Write the tensors that belong to no layer; return the manifest."""
    # An export makes copies of embedding and head anew, as training changes what they are copies of.
    copies = copies_of(source.weight_map, source.names, source.spec.tied)
    same = {name for name, of in copies.items() if same_bytes(source.read(name), source.read(of))}
    _write(target, source, [name for name in source.carried if name not in same])
    names = chain.from_iterable(source.files.values())
    return Manifest(  # with model-00001-of-00002.safetensors for pytorch_model-00001-of-00002.bin
        files={f"{Path(file).stem.removeprefix('pytorch_')}.safetensors": each for file, each in source.files.items()},
        dtypes={name: DTYPE_NAMES[source.info(name).dtype] for name in names},
        side_files=side_files(source.folder),
    )


def _write(target: Path, source: HuggingFaceSource | SafetensorsFile, names: list[str]) -> None:
    """Write the tensors that belong to no layer, if there are any."""
    infos = {name: source.info(name) for name in names}
    if names:
        with SafetensorsWriter(target, {CARRIED: names}, infos) as writer:
            for name in names:
                writer.write(name, source.read(name))
