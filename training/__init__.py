"""What a run is: config, processes, engine, optimizer, loop, metrics, checkpoints.

`training.train` trains a model of a known family, `training.Pipeline` layers of your own (docs/api.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.any_model.config import PipelineConfig
    from training.any_model.pipeline import Pipeline, load_trained
    from training.api import train
    from training.callbacks import Callback

__all__ = ["Callback", "Pipeline", "PipelineConfig", "load_trained", "train"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: torch takes a second, which an error class does not need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from training import api, callbacks
    from training.any_model import config, pipeline

    return next(vars(module)[name] for module in (api, callbacks, config, pipeline) if name in vars(module))
