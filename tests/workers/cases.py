"""Processes that stay and run cases for one test file after the other: started as runs are (`tests/ranks.py`).

usage: cases.py FOLDER OWNER. They wait for FOLDER/0, FOLDER/1 and so on, each with the name of a worker beside this
file and the path of a JSON file, a list of {"name", "config", ...}. They call `run_case(case, config, folder)` of the
worker for each, `folder` being that of the JSON file, and make FOLDER/<number>.done. They leave when they find
FOLDER/end, or when the process OWNER is no more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import threading
import time
from importlib import import_module
from itertools import count
from pathlib import Path

import psutil
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch.distributed import distributed_c10d

from data.loader import Loader
from data.sample_set import InMemory
from options import RunConfig
from tests.workers.leaving import leave
from training.batches import build_loader
from training.config.keys import TrainConfig
from training.distributed import joining, processes
from training.engine.replica_sums import ReplicaSums


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("owner", type=int)
    arguments = parser.parse_args()
    threading.Thread(target=leave_with, args=[arguments.owner], daemon=True).start()
    for number in count():
        asked = arguments.folder / str(number)
        while not asked.exists():
            if (arguments.folder / "end").exists():
                leave()
            time.sleep(0.05)
        worker, path = asked.read_text().splitlines()
        run_cases(worker, Path(path))
        if torch.distributed.get_rank() == 0:
            asked.with_suffix(".done").touch()


def leave_with(owner: int) -> None:
    """End this process when the one that asks for cases has ended."""
    while psutil.pid_exists(owner):
        time.sleep(1)
    os._exit(1)


def run_cases(worker: str, path: Path) -> None:
    """Run the cases of a file; the topology of the first of all says how many processes there must be."""
    process = processes.ProcessInfo.from_environment()
    assert process is not None
    run_case = import_module(f"tests.workers.{worker}").run_case
    for case in json.loads(path.read_text()):
        config = RunConfig.model_validate(case["config"])
        if not torch.distributed.is_initialized():
            joining.check_number(process, config.model_topo)
            joining.join(process)
        remembered = dict(vars(groups))
        run_case(case, config, path.parent)
        torch.distributed.barrier()
        vars(groups).update(remembered)  # DeepSpeed takes the groups of one engine for the next
        close_engines()


def close_engines() -> None:
    """Free engines and close their process groups: each has threads that wake up a hundred times a second.

    An engine's last outputs have hooks that lead back to it, and a parameter's gradients to the optimizer, by ways that
    Python's garbage collector does not see. What is free goes back to the system: else a vocabulary of 64,000 words
    leaves holes of half a GB with every case.
    """
    kinds = (DeepSpeedEngine, DeepSpeedZeroOptimizer, ReplicaSums, torch.optim.Optimizer)
    for part in [each for each in gc.get_objects() if issubclass(type(each), kinds)]:
        vars(part).clear()
    for group in list(distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def loader_of(config: TrainConfig) -> Loader:
    """The global batches of samples that are tokenized already."""
    samples = InMemory(json.loads(Path(str(config.data_path[0])).read_text()))
    router_loss = bool(config.aux_router_loss.weight)
    return build_loader(samples, config, router_loss=router_loss)


if __name__ == "__main__":
    main()
