"""One check of `training.preflight` on two ranks that pass for hosts; the outcome goes to <case>.<rank>.json.

Its cases are {"name", "config", "check", "folders": one for each rank, "hosts": their names, "keys": of each config,
"clock": seconds by which the second host is ahead, "versions": of its packages}.
"""

from __future__ import annotations

import io
import json
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from common.log import Log
from models.api import read_spec
from options.planner.resources import check_resources
from training import preflight
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.processes import ProcessInfo
from training.errors import RunRefused


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    rank = torch.distributed.get_rank()
    process = ProcessInfo(rank, 2, local_rank=0, local_size=1)
    own, printed, error = Path(case["folders"][rank]), io.StringIO(), None
    log, now, versions = Log(file=printed), time.time, preflight.versions
    with (
        patch.object(socket, "gethostname", lambda: case["hosts"][rank]),
        patch.object(time, "time", lambda: now() + rank * case["clock"]),
        patch.object(preflight, "versions", lambda: versions() | (case["versions"] if rank else {})),
        patch.object(preflight, "CODE", own if case["check"] == "code" else preflight.CODE),
        patch.object(preflight, "PATIENCE", 0.5),
    ):
        try:
            if case["check"] in ("setup", "code"):
                preflight.check_setup(config.model_copy(update=case["keys"][rank]), log)
            elif case["check"] == "model":
                preflight.check_model(own, case["weights"], folder / "notes")
            elif case["check"] == "room":
                spec, config = read_spec(own), config.model_copy(update={"save_path": str(own)})
                check_resources(config, spec, range(spec.n_layers), Disk.shared())
            else:
                preflight.check_folder(own, Disk.of(case["check"], process, config.model_topo), log)
        except RunRefused as refused:
            error = str(refused)
    outcome = {"error": error, "printed": printed.getvalue()}
    (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(outcome))
