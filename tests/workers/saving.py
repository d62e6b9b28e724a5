"""Saves the same state with and without `save_async`, and trains on before the thread's files are settled.

Its cases are {"name", "config": {...}, "kind": "zero" | "pipeline"}; writes <folder>/<name>.json with the names of the
"files", of those that "differ", whether the checkpoint was there "early", before it was settled, and what was
"printed". `latest` is in the way: a folder.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from models.api import read_spec
from models.checkpoint.layout import LATEST
from options.planner.planning import divide
from tests.workers.cases import loader_of
from tests.workers.topology import KINDS, ORDER
from training.checkpoint.folder import CheckpointRecord, step_folder
from training.checkpoint.saving import Checkpointer
from training.checkpoint.side_files import read_side_files
from training.config.keys import TrainConfig
from training.distributed.disk import Disk

STEP = 2


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    kind, loader, model_folder = KINDS[case["kind"]], loader_of(config), Path(config.model_path)
    spec = read_spec(model_folder)
    division = divide(config, spec, kind.in_stages)
    trainer = kind.build(config, spec, model_folder, division)
    for step in range(STEP):
        trainer.train_step(loader, loader.batch(step))
    record = CheckpointRecord(step=0, topology=division.topology, data=ORDER)
    saved = []
    early, printed = False, io.StringIO()
    for in_background in (False, True):
        save_path = folder / f"{case['name']}-{in_background}"
        (save_path / LATEST).mkdir(parents=True, exist_ok=True)
        asked = config.model_copy(update={"save_async": in_background})
        files, log = read_side_files(model_folder, read_spec(model_folder)), Console(file=printed, soft_wrap=True)
        saver = Checkpointer(trainer, asked, save_path, Disk.shared(), files, record, log)
        saver.save(STEP)
        saved.append(step_folder(save_path, STEP))
        early = saved[-1].exists()
    trainer.train_step(loader, loader.batch(STEP))
    saver.settle()
    assert saver.saved == STEP
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        names = [sorted(path.name for path in each.iterdir()) for each in saved]
        differ = [name for name in names[0] if (saved[0] / name).read_bytes() != (saved[1] / name).read_bytes()]
        assert names[0] == names[1], names
        outcome = {"files": names[0], "differ": differ, "early": early, "printed": printed.getvalue()}
        (folder / f"{case['name']}.json").write_text(json.dumps(outcome))
    torch.distributed.barrier()
    trainer.engine.destroy()
