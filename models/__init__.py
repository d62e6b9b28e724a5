"""Model families, layers, checkpoints of both layouts, the loss.

`load_model` loads a whole model in one process; `models.pipeline` splits the same layers over stages.
"""

from __future__ import annotations

import logging
from typing import Any

from models.errors import CheckpointError

# torchao, which transformers imports where it is installed, warns of missing kernels of other GPUs; torch's ONNX
# exporter of missing libraries that it does not need.
for _noisy in ("torchao", "torch.utils._pytree", "torch.onnx._internal.exporter._registration"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

__all__ = ["CausalLM", "CheckpointError", "load_model"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers, which take seconds, only when a model is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from models import api

    return getattr(api, name)
