"""Training on one topology and going on on another, case by case (see `cases.py`).

Its cases are {"name", "config": {...}, "kind": "zero" | "pipeline", "source": the name of a
case whose checkpoint is taken up, or null, "forget": the moments after that}. A case without a source is trained for
STEPS steps and saved after step SAVED_AT, one with a source from there on. Writes <folder>/<name>.json with the losses
and learning rates and <folder>/<name>.stage<k>.safetensors with what the optimizer kept after step SAVED_AT, as
`<layer>.<name>:<state>`, asked from DeepSpeed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from models.api import read_spec
from options.planner.planning import divide
from tests.workers.cases import loader_of
from training.checkpoint.folder import CheckpointRecord, DataOrder, step_folder
from training.checkpoint.resume import resume
from training.checkpoint.saving import Checkpointer
from training.checkpoint.side_files import read_side_files
from training.config.changes import settings_of
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.engine.pipeline import PipelineTrainer
from training.engine.trainer import Trainer
from training.engine.zero import ZeroTrainer
from training.optimizer.lr_schedules import LearningRate
from training.topology import Division

KINDS: dict[str, type[Trainer]] = {"pipeline": PipelineTrainer, "zero": ZeroTrainer}
STEPS, SAVED_AT = 10, 6
ORDER = DataOrder(samples=0, fingerprint="", seed=0, train_batch_size=8, dataloader_drop_last=False)


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    loader = loader_of(config)
    trainer, division, done = begin(case, KINDS[case["kind"]], config, folder, SAVED_AT)
    state = folder / case["name"]
    if case["source"]:
        keep_state(trainer, state)
        if case["forget"]:
            forget_moments(trainer.engine)
    learning_rate = LearningRate(trainer.engine.basic_optimizer, config.scheduler, STEPS)
    outcome: dict[str, Any] = {"losses": [], "rates": []}
    for step in range(done, STEPS):
        outcome["rates"].append(learning_rate.set(step + 1))
        outcome["losses"].append(trainer.train_step(loader, loader.batch(step)))
        if not case["source"] and step + 1 == SAVED_AT:
            save(trainer, config, division, state, SAVED_AT)
            keep_state(trainer, state)
    if torch.distributed.get_rank() == 0:
        (folder / f"{case['name']}.json").write_text(json.dumps(outcome))
    torch.distributed.barrier()
    trainer.engine.destroy()


def begin(
    case: dict[str, Any], kind: type[Trainer], config: TrainConfig, folder: Path, saved_at: int
) -> tuple[Trainer, Division, int]:
    """Build a case's trainer, from the checkpoint of its source if it has one; return how many steps are done too."""
    model_folder = Path(config.model_path)
    spec = read_spec(model_folder)
    division = divide(config, spec, kind.in_stages)
    if not case["source"]:
        return kind.build(config, spec, model_folder, division), division, 0
    checkpoint = step_folder(folder / case["source"], saved_at)
    known = CheckpointRecord.read(checkpoint)
    assert known is not None
    build = partial(kind.build, config.model_copy(update={"from_scratch": False}), spec, checkpoint, division)
    trainer = resume(checkpoint, known, division.topology, config, build, Console(quiet=True), spec)
    return trainer, division, known.step


def save(trainer: Trainer, config: TrainConfig, division: Division, save_path: Path, step: int) -> None:
    """Save a checkpoint as a run does."""
    model_folder = Path(config.model_path)
    record = CheckpointRecord(step=0, topology=division.topology, data=ORDER, settings=settings_of(config))
    side_files = read_side_files(model_folder, read_spec(model_folder))
    save_path.mkdir(exist_ok=True)
    Checkpointer(trainer, config, save_path, Disk.shared(), side_files, record, Console(quiet=True)).save(step)


def keep_state(trainer: Trainer, path: Path) -> None:
    """Write what the optimizer keeps of the weights of this rank's stage."""
    engine = trainer.engine
    optimizer = engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed 0.19.8 does this in the first step only, when but the first group has states.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    states = next(iter(engine.basic_optimizer.state.values()))
    keys = [key for key, state in states.items() if isinstance(state, Tensor) and state.dim()]
    kept = {}
    for name, weight in engine.module.named_parameters():
        for key, tensor in state_of(engine, weight, keys).items():
            kept[f"{name}:{key}"] = tensor.detach().clone().contiguous()
    kept["step"] = torch.tensor(float(states.get("step", 0)))
    replica = engine.grid.get_data_parallel_id() if isinstance(trainer, PipelineTrainer) else engine.global_rank
    if replica == 0:
        save_file(kept, path.with_name(f"{path.name}.stage{trainer.stage}.safetensors"))


def state_of(engine: DeepSpeedEngine, weight: Any, keys: list[str]) -> dict[str, Tensor]:
    """The fp32 weight and the states of a parameter, whole."""
    if hasattr(weight, "ds_id") or hasattr(weight, "_hp_mapping"):
        states = {key: safe_get_full_optimizer_state(weight, key) for key in keys}
        return {"fp32": safe_get_full_fp32_param(weight)} | states
    owner = weight
    for masters, weights in zip(
        getattr(engine.optimizer, "fp32_groups", []), getattr(engine.optimizer, "fp16_groups", []), strict=True
    ):
        owner = next((master for master, each in zip(masters, weights, strict=True) if each is weight), owner)
    state = engine.basic_optimizer.state[owner]
    return {"fp32": owner} | {key: state[key] for key in state.keys() & {*keys, "row_var", "col_var", "variance"}}


def forget_moments(engine: DeepSpeedEngine) -> None:
    for states in engine.basic_optimizer.state.values():
        for state in states.values():
            if state.dim():
                state.zero_()
