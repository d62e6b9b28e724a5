"""Models that say what a test knows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from safetensors.torch import load_file, save_file


def make_recite(folder: Path, ids: Sequence[int], embedding: str, head: str) -> None:
    """Let each of these tokens, all different, say the next, where the weights of a folder are zeros."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert len(set(ids)) == len(ids) <= tensors[f"{embedding}.weight"].shape[1]
    for number, (token, following) in enumerate(pairwise(ids)):
        tensors[f"{embedding}.weight"][token, number] = 1.0
        tensors[f"{head}.weight"][following, number] = 1.0
    save_file(tensors, path, metadata={"format": "pt"})
