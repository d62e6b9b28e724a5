"""What a model is: families, layers, checkpoints of both layouts, the loss.

`load_model` gives a whole model in one process; `models.pipeline` splits the same layers over stages (it imports
DeepSpeed, so it is not imported here).
"""

from models.causal_lm import CausalLM, load_model
from models.errors import CheckpointError

__all__ = ["CausalLM", "CheckpointError", "load_model"]
