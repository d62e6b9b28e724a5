"""What stands beside a checkpoint's layers, so that they are a model: config, tokenizer, and where it is to stop."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

from data.chat.native.kinds import complete_tokenizer
from models.checkpoint.layout import Manifest
from models.config_json import read_json, write_json
from models.conversion.to_pipeline import copy_side_files

GENERATION = "generation_config.json"


def read_side_files(model_folder: Path, ends: Collection[int] = ()) -> dict[str, bytes]:
    """What makes a folder of layer files complete, by name: read once, as the model may be gone when a run saves.

    Args:
        ends: the ids at which servers are to stop; those of the model where there are none.

    Raises:
        CheckpointError: the folder is incomplete.
    """
    with TemporaryDirectory() as made:
        folder = Path(made)
        copy_side_files(model_folder, folder)
        before = [path.name for path in folder.iterdir()]
        complete_tokenizer(model_folder, folder)
        if ends:
            _write_ends(folder, ends)
        if (manifest := Manifest.read(folder)) is not None:  # an export has the files that it lists
            made_here = {path.name for path in folder.iterdir()} - {*before, *manifest.side_files}
            manifest.side_files += sorted(made_here)
            manifest.write(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def _write_ends(folder: Path, ends: Collection[int]) -> None:
    path = folder / GENERATION
    settings = read_json(path) if path.is_file() else {}
    write_json(path, settings | {"eos_token_id": sorted(ends)})
