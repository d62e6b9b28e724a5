"""Looking for the checkpoint to continue from, case by case (see `cases.py`).

Its cases are {"name", "config": {...}}; writes <folder>/<name>.json with the name of the
checkpoint that was "found" in the config's save_path, or null, and what was "told".
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from training.checkpoint.finding import find_checkpoint
from training.config.keys import TrainConfig
from training.distributed.disk import Disk


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    told = io.StringIO()
    found = find_checkpoint(config, Path(config.save_path), Disk.of_all(), Console(file=told, soft_wrap=True))
    if torch.distributed.get_rank() == 0:
        outcome = {"found": found and found.name, "told": told.getvalue()}
        (folder / f"{case['name']}.json").write_text(json.dumps(outcome))
