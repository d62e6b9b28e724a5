"""HuggingFace layout -> pipeline layout, one layer at a time.

At most one layer is in memory, and the target folder appears whole or not at all. What an export needs to give the
folder back (division into files, dtypes, tensors without a layer) is written beside the layers.
"""

from __future__ import annotations

import logging
import os
import shutil
from functools import partial
from pathlib import Path

from models.api import read_spec
from models.checkpoint import layout
from models.checkpoint.layout import CARRIED, TEMPLATES, Manifest, flat, layer_file, side_files
from models.checkpoint.publish import publish_folder
from models.checkpoint.source import HuggingFaceSource, PipelineSource, compare, forget_cached, warn_of_nan
from models.checkpoint.tensor_files import DTYPE_NAMES, SafetensorsWriter, save_state_dict
from models.checkpoint.tensor_io import byte_bar, write_behind
from models.config_json import QUANTIZATION, read_json, write_json
from models.errors import CheckpointError

logger = logging.getLogger("pipetune")


def hg_to_pp(input_path: str | Path, save_path: str | Path, overwrite: bool = False, verify: bool = False) -> None:
    """Write the pipeline layout of a HuggingFace folder.

    Args:
        overwrite: replace `save_path` where Pipetune wrote it.
        verify: read every tensor back and compare it before the folder appears.

    Raises:
        CheckpointError: the input is damaged or unknown, or the target cannot be written.
    """
    folder = layout.resolve(input_path)
    if layout.layout_of(folder) is not layout.Layout.HUGGINGFACE:
        raise CheckpointError(f"{folder}: already in the pipeline layout; hg_to_pp expects a HuggingFace folder")
    spec = read_spec(folder)
    source = HuggingFaceSource(folder, spec)
    paths_of(folder, side_files(folder))  # or the end of the conversion would refuse them
    with publish_folder(Path(save_path), overwrite, [folder]) as target:
        with byte_bar("hg_to_pp", source.size()) as bar:
            for layer in range(spec.n_layers):
                bar.update(_write_layer(source, layer, target))
                for recent in range(max(0, layer - 1), layer + 1):
                    write_behind(target / layer_file(recent))
        copy_side_files(folder, target, in_folders=True)
        if verify:
            _verify(source, target)


def paths_of(source: Path, names: list[str]) -> dict[str, Path]:
    """Locate a folder's files by name.

    Raises:
        CheckpointError: one is a link to somewhere else on this machine.
    """
    folder = Path(os.path.realpath(source))
    cache = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    paths = {name: source / (flat(name) if (source / flat(name)).exists() else name) for name in names}
    for path in paths.values():
        if Path(os.path.realpath(path)).parent not in (folder, folder / TEMPLATES, cache):
            raise CheckpointError(f"{path}: a link that leads out of the folder; expected the file itself")
    return paths


def copy_files(source: Path, target: Path, names: list[str], in_folders: bool = True) -> None:
    """Copy files byte for byte, also through links into HuggingFace's cache.

    Args:
        in_folders: the names have folders; else all files lie side by side.

    Raises:
        CheckpointError: one is missing, or as `paths_of`.
    """
    for name, path in paths_of(source, names).items():
        copy = target / (name if in_folders else flat(name))
        copy.parent.mkdir(exist_ok=True)
        try:
            shutil.copyfile(path, copy)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: not found; the folder is incomplete") from None


def copy_side_files(source: Path, target: Path, in_folders: bool = False) -> None:
    """Complete a folder of layer files: config, tokenizer, manifest, carried tensors.

    Args:
        source: of either layout: what the layers or the training came from; from scratch it needs no weights.
        target: of the layer files.
        in_folders: as `copy_files`; a run's checkpoint has none.
    """
    manifest = Manifest.read(source)
    if manifest is None and layout.has_huggingface_weights(source):
        manifest = _write_carried(HuggingFaceSource(source, read_spec(source)), target)
    elif (source / CARRIED).is_file():
        copy_files(source, target, [CARRIED])
    copy_files(source, target, side_files(source), in_folders)
    path = target / "config.json"
    if path.is_file() and QUANTIZATION in (config := read_json(path)):  # the weights beside it no longer are
        logger.info("%s: quantized weights are read as what they stand for, and written in 16 or 32 bits", target)
        write_json(path, {name: value for name, value in config.items() if name != QUANTIZATION})
    if manifest:
        manifest.write(target)


def _write_layer(source: HuggingFaceSource, layer: int, target: Path) -> int:
    state = source.read_layer(layer)
    warn_of_nan(state, partial(source.describe, layer))
    save_state_dict(state, target / layer_file(layer))
    return sum(tensor.nbytes for tensor in state.values())


def _verify(source: HuggingFaceSource, target: Path) -> None:
    written = PipelineSource(target, source.spec)
    with byte_bar("verify", source.size()) as bar:
        for layer in range(source.spec.n_layers):
            path = target / layer_file(layer)
            forget_cached(path)
            bar.update(compare(path, source.read_layer(layer), written.read_layer(layer)))


def _write_carried(source: HuggingFaceSource, target: Path) -> Manifest:
    """Write the tensors that belong to no layer; return the manifest."""
    if carried := source.carried:
        infos = {name: source.info(name) for name in carried}
        with SafetensorsWriter(target, {CARRIED: carried}, infos) as writer:
            for name in carried:
                writer.write(name, source.read(name))
    names = [name for names in source.files.values() for name in names]
    return Manifest(
        files={_safetensors_name(file): names for file, names in source.files.items()},
        dtypes={name: DTYPE_NAMES[source.info(name).dtype] for name in names},
        side_files=side_files(source.folder),
    )


def _safetensors_name(file: str) -> str:
    """Rename pytorch_model-00001-of-00002.bin to model-00001-of-00002.safetensors."""
    return (
        file if file.endswith(".safetensors") else f"{file.removeprefix('pytorch_').removesuffix('.bin')}.safetensors"
    )
