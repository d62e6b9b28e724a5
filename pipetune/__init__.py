"""Pipetune as a package, after `pip install .`: what docs/api.md names, without other top-level names.

    import pipetune
    model = pipetune.load_model("../llm/qwen3-8b")

The packages lie inside as `pipetune.models`, `pipetune.data`, `pipetune.options` and `pipetune.training`. In a clone
they lie beside this folder, under their own names.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
INSTALLED = (FOLDER / "models").is_dir()  # as setup.py has put it there
# Where the public names lie.
_PACKAGES = {
    "load_model": "models",
    "encode": "data",
    "Callback": "training",
    "train": "training",
    "load_config": "options",
    "Pipeline": "options.any_layers",
    "PipelineConfig": "options.any_layers",
    "load_trained": "options.any_layers",
}
__all__ = ["Callback", "Pipeline", "PipelineConfig", "__version__"]
__all__ += ["encode", "load_config", "load_model", "load_trained", "train"]


def __getattr__(name: str) -> Any:
    """torch takes a second; who only wants the version does without."""
    if name == "__version__":
        return _package("common.version").VERSION
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_package(_PACKAGES[name]), name)


def _package(name: str) -> Any:
    return import_module(f"{__name__}.{name}" if INSTALLED else name)
