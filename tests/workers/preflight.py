"""One check of `training.preflight`, with the folder that each rank has; the outcome goes to <case>.<rank>.json."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import torch

from common.log import Log
from models.api import read_spec
from training import preflight
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import Place
from training.errors import RunRefused
from training.plan.resources import check_resources


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    rank, place = torch.distributed.get_rank(), Place.from_environment()
    assert place
    gethostname, socket.gethostname = socket.gethostname, f"node{rank + 1}".format
    preflight.PATIENCE = 0.5
    own = Path(case["folders"][rank])
    message = None
    try:
        if case["check"] == "setup":
            preflight.check_setup(config.model_copy(update=case["keys"][rank]), Log(quiet=True))
        elif case["check"] == "model":
            preflight.check_model(own, weights=case["weights"])
        elif case["check"] == "room":
            spec = read_spec(own)
            check_resources(
                config.model_copy(update={"save_path": str(own)}), spec, range(spec.n_layers), Disk.of_all()
            )
        else:
            preflight.check_folder(own, Disk.of(case["check"], place, config.model_topo), Log(quiet=True))
    except RunRefused as refused:
        message = str(refused)
    finally:
        socket.gethostname = gethostname
    (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(message))
