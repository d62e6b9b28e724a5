"""What a run is: config, processes, engine, optimizer, loop, metrics, checkpoints.

`training.train` trains a model of a known family, `training.Pipeline` layers of your own (docs/api.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.any_model.config import PipelineConfig
    from training.any_model.pipeline import Pipeline, load_trained
    from training.api import train

__all__ = ["Pipeline", "PipelineConfig", "load_trained", "train"]
_PLACES = {"train": ".api", "PipelineConfig": ".any_model.config"}


def __getattr__(name: str) -> Any:
    """torch takes a second; who only wants an error class does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES.get(name, ".any_model.pipeline"), __name__), name)
