"""Training where processes share layers, and going on on another topology, case by case (see `cases.py`).

Its cases are {"name", "config": {...}, "source": the name of a case whose checkpoint is taken up, or null}. A case
trains STEPS steps and is saved after SAVED_AT, one with a source goes on from there. Writes <folder>/<name>.json with
the losses and norms of the steps and <folder>/<name>.stage<k>.safetensors with the weights, and what the optimizer kept
of them after step SAVED_AT, each whole, as `<layer>.<name>:<state>`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models.parallel.groups import add_up
from tests.workers.cases import loader_of
from tests.workers.topology import begin, save, state_of
from training.config.keys import TrainConfig
from training.engine.pipeline import PipelineTrainer
from training.engine.trainer import Trainer

STEPS, SAVED_AT = 4, 2


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    loader, state = loader_of(config), folder / case["name"]
    trainer, division, done = begin(case, PipelineTrainer, config, folder, SAVED_AT)
    if case["source"]:
        keep_state(trainer, state)
    losses, norms = [], []
    for step in range(done, STEPS):
        losses.append(trainer.train_step(loader, loader.batch(step)))
        norms.append(float(trainer.engine.get_global_grad_norm()))
        if step + 1 == SAVED_AT:
            save(trainer, config, division, state, SAVED_AT)
            keep_state(trainer, state)
    if torch.distributed.get_rank() == 0:
        (folder / f"{case['name']}.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    torch.distributed.barrier()
    trainer.engine.destroy()


def keep_state(trainer: Trainer, path: Path) -> None:
    """Write what the optimizer keeps of the weights of this rank's stage, put together."""
    engine = trainer.engine
    optimizer, share = engine.optimizer, engine.module.share
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    states = next(iter(engine.basic_optimizer.state.values()))
    keys = [key for key, state in states.items() if state.dim()]
    kept = {}
    for name, weight in engine.module.named_parameters():
        for key, tensor in sorted(({"": weight} | state_of(engine, weight, keys)).items()):  # alike on all ranks
            part, cut = tensor.detach().clone().view(weight.shape), share.shard(name)
            if cut:
                whole = torch.zeros(cut.shape, dtype=part.dtype)
                cut.put(part, whole)
                part = add_up(whole, share.ranks)
            kept[f"{name}:{key}"] = part.contiguous()
    if trainer.replica == 0 and trainer.groups.tensor.rank == 0:
        save_file(kept, path.with_name(f"{path.name}.stage{trainer.stage}.safetensors"))
