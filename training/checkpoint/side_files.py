"""Read the files that make layer files a model: config, tokenizer, and the tokens at which to stop."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

from data.chat.native.kinds import export_tokenizer
from models.checkpoint.layout import Manifest
from models.checkpoint.side_files import copy_side_files
from models.config_json import read_json, write_json
from models.spec import ModelSpec

GENERATION = "generation_config.json"


def read_side_files(model_folder: Path, spec: ModelSpec, ends: Collection[int] = ()) -> dict[str, bytes]:
    """Read the side files of a model, name -> content, once: the model may be gone when a run saves.

    Args:
        ends: token ids at which servers must stop; empty to keep the model's own.
    """
    with TemporaryDirectory() as made:
        folder = Path(made)
        copy_side_files(model_folder, folder, spec)
        before = [path.name for path in folder.iterdir()]
        export_tokenizer(model_folder, folder, native=False)
        if ends:
            path = folder / GENERATION
            settings = read_json(path) if path.is_file() else {}
            write_json(path, settings | {"eos_token_id": sorted(ends)})
        if (manifest := Manifest.read(folder)) is not None:  # an export has the files that it lists
            made_here = {path.name for path in folder.iterdir()} - {*before, *manifest.side_files}
            manifest.side_files += sorted(made_here)
            manifest.write(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}
