"""Find eyes in the pipeline layout, whose first layer has them where a run saw images."""

from __future__ import annotations

from pathlib import Path

from models.checkpoint.layout import layer_file
from models.checkpoint.tensor_files import MappedFile
from models.family import EYES


def eyes_in_layers(folder: Path) -> bool:
    """Return whether a pipeline folder's first layer has a tower, as a run with images wrote it."""
    path = folder / layer_file(0)
    return path.is_file() and any(name.startswith(f"{EYES}.") for name in MappedFile(path))
