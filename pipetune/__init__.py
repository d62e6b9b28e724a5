"""Pipetune as a package, after `pip install .`: what docs/api.md names, without other top-level names.

    import pipetune
    model = pipetune.load_model("../llm/qwen3-8b")

The wings lie inside as `pipetune.models`, `pipetune.data` and `pipetune.training`. In a clone they lie beside this
folder, under their own names.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
INSTALLED = (FOLDER / "models").is_dir()  # as setup.py has put it there
# Where the public names lie.
_WINGS = {
    "load_model": "models",
    "encode": "data",
    "train": "training",
    "Pipeline": "training",
    "PipelineConfig": "training",
    "load_trained": "training",
}
__all__ = ["Pipeline", "PipelineConfig", "__version__", "encode", "load_model", "load_trained", "train"]


def __getattr__(name: str) -> Any:
    """torch takes a second; who only wants the version does without."""
    if name == "__version__":
        return _wing("common.version").VERSION
    if name not in _WINGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_wing(_WINGS[name]), name)


def _wing(name: str) -> Any:
    return import_module(f"{__name__}.{name}" if INSTALLED else name)
