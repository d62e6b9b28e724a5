"""Generation by processes that hold a model together: started by the real launcher.

usage: tensor_parallel.py CASES.json, a list of {"folder", "prompts", "count"}; writes outcomes.json beside it: for each
case what each rank did, its tokens, or what it refused, and how many weights it holds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch import distributed

from models import CheckpointError
from models.api import load_share
from models.generation import Request, generate_many
from tests.workers.leaving import leave
from training.distributed.processes import gather


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    path = parser.parse_args().cases
    distributed.init_process_group("gloo")
    outcomes = [gather(run_case(case)) for case in json.loads(path.read_text())]
    if distributed.get_rank() == 0:
        (path.parent / "outcomes.json").write_text(json.dumps(outcomes))
    leave()


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    group = distributed.group.WORLD
    assert group
    try:
        model = load_share(case["folder"], group)
    except CheckpointError as error:
        return {"refused": str(error)}
    requests = [Request(prompt, case["count"], set()) for prompt in case["prompts"]]
    for _ in generate_many(model, requests, rows=2):
        pass
    held = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    return {"texts": [request.text for request in requests], "held": held}


if __name__ == "__main__":
    main()
