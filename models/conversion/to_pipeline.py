"""Convert the HuggingFace layout to the pipeline layout, one layer at a time.

At most one layer is in memory, and the target folder appears whole or not at all. What an export needs to restore the
folder (division into files, dtypes, tensors without a layer) is written beside the layers.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from models.api import read_spec
from models.checkpoint import layout
from models.checkpoint.hub import find_model
from models.checkpoint.layout import layer_file, side_files
from models.checkpoint.publish import publish_folder
from models.checkpoint.side_files import copy_side_files, paths_of
from models.checkpoint.source import HuggingFaceSource, PipelineSource, compare_bytes, forget_cached, warn_of_nan
from models.checkpoint.tensor_files import save_state_dict
from models.checkpoint.tensor_io import byte_bar, write_behind
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
    folder = find_model(input_path)
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
        copy_side_files(folder, target, spec, in_folders=True)
        if verify:
            _verify(source, target)


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
            bar.update(compare_bytes(path, source.read_layer(layer), written.read_layer(layer)))
