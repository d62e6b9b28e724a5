"""Tensor parallelism for generation: every process holds a share of each layer, and all answer together.

The shares are those of training (`models.parallel.tensor`). All processes ask the same, see the same logits and so
choose the same tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed

from models.causal_lm import CausalLM
from models.checkpoint.layout import resolve
from models.checkpoint.source import open_source
from models.errors import CheckpointError
from models.parallel.peers import Peers
from models.parallel.tensor import TensorShare, obstacle
from models.spec import ModelSpec


def load_share(
    path: str | Path, group: distributed.ProcessGroup, dtype: torch.dtype | None = None, device: str = "cpu"
) -> CausalLM:
    """This process's share of the model in a folder of either layout; all processes of the group call it.

    Raises:
        CheckpointError: see `load_model`; or so many processes cannot share the layers.
    """
    folder = resolve(path)
    spec = ModelSpec.from_folder(folder)
    if reason := obstacle(spec, group.size()):
        raise CheckpointError(f"{folder}: tensor parallelism: {reason}")
    source, share = open_source(folder, spec), TensorShare(spec, Peers(group.size(), group.rank(), group))
    return CausalLM(spec, source, dtype or source.dtype(), torch.device(device), share=share).eval()
