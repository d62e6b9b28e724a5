"""Measures the links of these ranks, and writes them to <case>.<rank>.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from options.cluster.measuring import measure
from training.config.keys import TrainConfig


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    links = measure(config.model_topo, ["node1", "node2"])
    (folder / f"{case['name']}.{torch.distributed.get_rank()}.json").write_text(links.model_dump_json())
