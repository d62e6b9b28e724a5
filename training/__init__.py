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
    from training.callbacks import Callback

__all__ = ["Callback", "Pipeline", "PipelineConfig", "load_trained", "train"]
_MODULES = {"Callback": ".callbacks", "train": ".api", "PipelineConfig": ".any_model.config"}


def __getattr__(name: str) -> Any:
    """Import what is asked for: torch takes a second, which an error class does not need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, ".any_model.pipeline"), __name__), name)
