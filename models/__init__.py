"""What a model is: families, layers, checkpoints of both layouts, the loss.

`load_model` gives a whole model in one process; `models.pipeline` splits the same layers over stages (it imports
DeepSpeed, so it is not imported here).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from models.errors import CheckpointError

if TYPE_CHECKING:
    from models.api import CausalLM, load_model

# torchao, which transformers imports where it is installed, tells of the kernels of other GPUs that it does not find;
# torch's ONNX exporter of libraries that it could do without.
for _noisy in ("torchao", "torch.utils._pytree", "torch.onnx._internal.exporter._registration"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

__all__ = ["CausalLM", "CheckpointError", "load_model"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers, which take seconds, only when a model is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from models import api

    return getattr(api, name)
