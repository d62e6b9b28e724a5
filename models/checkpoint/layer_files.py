"""Writing a layer's state dict as DeepSpeed does: a torch archive, checksums included."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def save_state_dict(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a layer.

    Raises:
        OSError: the disk is full or cannot be written; torch itself hides that behind a RuntimeError.
    """
    # A tensor that is a part of a larger one would drag the whole of it into the file.
    own = {
        name: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        for name, tensor in state.items()
    }
    try:
        with open(path, "wb") as file:
            torch.save(own, file)
    except RuntimeError as error:
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else OSError(errno.EIO, str(error)) from None
