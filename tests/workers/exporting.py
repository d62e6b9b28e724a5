"""The export of a checkpoint by several ranks, with what may go wrong on one of them: started by the real launcher.

usage: exporting.py CASES.json, a list of {"checkpoint", "target", "model": the folder that the run began with, "held":
the layers of each rank's stage, "full": the rank whose disk takes nothing, or null}; writes outcomes.json beside it:
for each case, what each rank raised (or null) and which layers it read.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from models.checkpoint.source import PipelineSource
from tests.workers.leaving import leave
from training.checkpoint.exporting import export_run
from training.distributed.processes import ProcessInfo, gather
from training.errors import RunRefused


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("--local_rank", type=int)
    path = parser.parse_args().cases
    torch.distributed.init_process_group("gloo")
    outcomes = [gather(run_case(case)) for case in json.loads(path.read_text())]
    if torch.distributed.get_rank() == 0:
        (path.parent / "outcomes.json").write_text(json.dumps(outcomes))
    leave()


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    process = ProcessInfo.from_environment()
    assert process is not None
    read: list[int] = []
    read_layer = PipelineSource.read_layer

    def watched(source: PipelineSource, layer: int) -> dict[str, Tensor]:
        read.append(layer)
        return read_layer(source, layer)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if case["full"] == process.rank else limits[0], limits[1]))
    refused = None
    with patch.object(PipelineSource, "read_layer", watched):
        try:
            checkpoint, target, model = (Path(case[name]) for name in ("checkpoint", "target", "model"))
            export_run(checkpoint, target, case["held"][process.rank], model, lambda *_: None)
        except RunRefused as error:
            refused = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {"refused": refused, "read": read}


if __name__ == "__main__":
    main()
