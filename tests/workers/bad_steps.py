"""A step on a sample that makes everything NaN, case by case (see `cases.py`).

Its cases are {"name", "config": {...}, "kind": "zero" | "pipeline"}; the last sample of the
data is the bad one. Writes <folder>/<name>.json: the evaluation loss of the good samples before, after a step on all
samples, and after a step on the good ones; with the bad step's loss and norm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.workers.cases import loader_of
from tests.workers.zero import KINDS, build
from training.config.keys import TrainConfig


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    loader = loader_of(config)
    trainer = build(KINDS[case["kind"]], config)
    everything = list(range(len(loader.data.lengths)))
    good = loader.batch_of(everything[:-1])
    outcome = {"before": trainer.eval_loss(loader, good)}
    outcome["loss"] = trainer.train_step(loader, loader.batch_of(everything))
    outcome["grad_norm"] = float(trainer.engine.get_global_grad_norm())
    outcome["after_bad"] = trainer.eval_loss(loader, good)
    trainer.train_step(loader, good)
    outcome["after_good"] = trainer.eval_loss(loader, good)
    if trainer.engine.global_rank == 0:
        (folder / f"{case['name']}.json").write_text(json.dumps(outcome))
    torch.distributed.barrier()
    trainer.engine.destroy()
