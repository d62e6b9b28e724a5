"""A few training steps per case, their losses and gradient norms kept: started by the real launcher for one `dims`.

usage: clipping.py CASES.json, a list of {"name", "config": {...}}; writes <folder>/<name>.json with the steps'
"losses" and "norms".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from data.loader import Loader
from models.spec import ModelSpec
from training import distributed
from training.config import TrainConfig
from training.engine import build_engine
from training.pipeline_trainer import PipelineTrainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    cases = [
        (case["name"], TrainConfig.model_validate(case["config"])) for case in json.loads(arguments.cases.read_text())
    ]
    place = distributed.Place.from_environment()
    assert place is not None
    distributed.start(place, cases[0][1].model_topo)
    for name, config in cases:
        run_case(name, config, arguments.cases.parent)
    distributed.stop()


def run_case(name: str, config: TrainConfig, folder: Path) -> None:
    samples = json.loads(Path(config.data_paths[0]).read_text())
    loader = Loader(
        samples,
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.model_topo.replicas,
        config.seed,
    )
    model_folder = Path(config.model_path)
    steps = config.n_epoches * loader.steps_per_epoch
    engine = build_engine(config, ModelSpec.from_folder(model_folder), model_folder, steps)
    trainer = PipelineTrainer(engine)
    losses, norms = [], []
    for step in range(steps):
        losses.append(trainer.train_step(loader, loader.batch(step)))
        norms.append(float(engine.get_global_grad_norm()))
    if engine.global_rank == 0:
        (folder / f"{name}.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    torch.distributed.barrier()
    engine.destroy()


if __name__ == "__main__":
    main()
