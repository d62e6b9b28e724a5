"""Saving a run: a checkpoint folder is also a pipeline-layout folder.

DeepSpeed writes one file a layer and the optimizer's shards; config, tokenizer and manifest are laid beside them, so
that `pp_to_hg`, `demo.py` and `model_path` take the folder as it is. `latest` moves only when all of that is there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from models.checkpoint.convert import copy_side_files
from models.checkpoint.layout import LATEST


def save_checkpoint(engine: PipelineEngine, save_path: Path, model_folder: Path) -> Path:
    """Save the current step as `save_path`/step-<number> and point `latest` at it.

    Args:
        model_folder: the folder that the run started from; its config and tokenizer go along.

    Returns:
        The checkpoint's folder.
    """
    tag = f"step-{engine.global_steps:06d}"
    engine.save_checkpoint(str(save_path), tag=tag, save_latest=False)
    folder = save_path / tag
    if engine.global_rank == 0:
        copy_side_files(model_folder, folder)
        marker = save_path / f".{LATEST}.partial"
        marker.write_text(tag, encoding="utf-8")
        marker.replace(save_path / LATEST)
    torch.distributed.barrier()
    return folder
