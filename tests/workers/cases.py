"""What the workers share: a file of cases on the command line, run one after the other by one set of processes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.loader import Loader
from data.sample_set import InMemory
from training.config.keys import TrainConfig
from training.data_setup import build_loader
from training.distributed import processes


def run_cases(run_case: Callable[[dict[str, Any], TrainConfig, Path], None]) -> None:
    """Call `run_case(case, config, folder)` for each {"name", "config", ...} in the file that the launcher was given.

    The processes start once, with the topology of the first case; `folder` is the file's.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("--local_rank", type=int)
    path = parser.parse_args().cases
    place = processes.Place.from_environment()
    assert place is not None
    cases = [(case, TrainConfig.model_validate(case["config"])) for case in json.loads(path.read_text())]
    processes.start(place, cases[0][1].model_topo)
    for case, config in cases:
        run_case(case, config, path.parent)
    processes.stop()


def loader_of(config: TrainConfig) -> Loader:
    """The global batches of samples that are tokenized already."""
    samples = InMemory(json.loads(Path(str(config.data_path[0])).read_text()))
    return build_loader(samples, config, config.model_topo.replicas)
