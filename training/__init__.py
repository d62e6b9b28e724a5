"""What a run is: config, processes, engine, optimizer, loop, metrics, checkpoints.

`training.train` trains a model of a known family (docs/api.md).
"""

from __future__ import annotations

from typing import Any

from training.callbacks import Callback

__all__ = ["Callback", "train"]
MOVED = ("Pipeline", "PipelineConfig", "load_trained")


def __getattr__(name: str) -> Any:
    """Import what is asked for: torch takes a second, which an error class does not need."""
    if name in MOVED:
        raise ImportError(f"training.{name}: it has moved; expected from options.any_layers import {name}")
    if name == "train":
        from training.api import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
