"""Training by ZeRO or by a pipeline, case by case (see `cases.py`).

Its cases are {"name", "config": {...}, "kind": "zero" | "pipeline", "resume": bool}; writes
<folder>/<name>.json with the losses and gradient norms of STEPS steps, the losses of an evaluation before and after,
with `resume` the losses after step RESUME_AT of a second engine that took up the first one's checkpoint, and what each
rank held of the weights: at most while they were read, and then. With ZeRO it also writes the layer files into
<folder>/<name>.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import models.sharded
from models.api import read_spec
from options.planner.planning import divide
from tests.workers.cases import loader_of
from training.config.keys import TrainConfig
from training.distributed import processes
from training.distributed.disk import Disk
from training.engine.pipeline import PipelineTrainer
from training.engine.trainer import Trainer
from training.engine.zero import ZeroTrainer

KINDS: dict[str, type[Trainer]] = {"pipeline": PipelineTrainer, "zero": ZeroTrainer}
STEPS, RESUME_AT = 10, 7


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    outcome = outcome_of(KINDS[case["kind"]], config, folder / case["name"], case["resume"])
    if torch.distributed.get_rank() == 0:
        (folder / f"{case['name']}.json").write_text(json.dumps(outcome))


def outcome_of(kind: type[Trainer], config: TrainConfig, folder: Path, resume: bool) -> dict[str, Any]:
    loader = loader_of(config)
    outcome: dict[str, Any] = {"loss": [], "grad_norm": []}
    with watched_build() as held:
        trainer = build(kind, config)
    outcome["held_while_reading"] = processes.gather(max(held, default=0))
    outcome["held"] = processes.gather(held_of(trainer.engine.module.parameters()))
    outcome["eval"] = [trainer.eval_loss(loader, loader.batch(0))]
    for step in range(STEPS):
        outcome["loss"].append(trainer.train_step(loader, loader.batch(step)))
        outcome["grad_norm"].append(float(trainer.engine.get_global_grad_norm() or 0))
        if resume and step + 1 == RESUME_AT:
            trainer.engine.save_checkpoint(str(folder), tag="resume")
    outcome["eval"].append(trainer.eval_loss(loader, loader.batch(0)))
    folder.mkdir(exist_ok=True)
    trainer.write_layers(folder, torch.save, Disk.shared())
    trainer.engine.destroy()
    if not resume:
        return outcome
    again = build(kind, config)
    again.engine.load_checkpoint(str(folder), tag="resume")
    outcome["resumed"] = [again.train_step(loader, loader.batch(step)) for step in range(RESUME_AT, STEPS)]
    again.engine.destroy()
    return outcome


def build(kind: type[Trainer], config: TrainConfig) -> Trainer:
    folder = Path(config.model_path)
    spec = read_spec(folder)
    return kind.build(config, spec, folder, divide(config, spec, kind.in_stages))


@contextmanager
def watched_build() -> Iterator[list[int]]:
    """Note how many elements of the weights this process holds whenever a layer has been read."""
    known = {id(each) for each in all_parameters()}
    held: list[int] = []
    build_layer = models.sharded.build_layer

    def watched(*arguments: Any, **named: Any) -> nn.Module:
        layer = build_layer(*arguments, **named)
        held.append(held_of(each for each in all_parameters() if id(each) not in known))
        return layer

    with patch("models.sharded.build_layer", watched):
        yield held


def held_of(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of parameters, whole or in slices."""
    return sum(each.numel() + (each.ds_tensor.numel() if hasattr(each, "ds_tensor") else 0) for each in parameters)


def all_parameters() -> list[nn.Parameter]:
    """Those that exist in this process and have memory."""
    return [each for each in gc.get_objects() if type(each) is nn.Parameter and each.device.type != "meta"]
