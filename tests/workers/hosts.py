"""Jobs as in `jobs.py` by two or more ranks that pass for hosts, each with a disk of its own.

Its cases are those of `jobs.py` with "hosts", the name of each rank's host, and "disks", the folder that each is in;
paths of the config that are relative are on these disks. With "first" each rank is the first one of its host.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.workers import jobs
from training.config.keys import TrainConfig


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    rank, before = torch.distributed.get_rank(), os.getcwd()
    named = patch.object(socket, "gethostname", lambda: case["hosts"][rank])
    argv = patch.object(sys, "argv", [os.path.abspath(sys.argv[0]), *sys.argv[1:]])
    local = patch.dict(os.environ, {"LOCAL_RANK": "0"} if case.get("first") else {})
    with named, argv, local:
        os.chdir(case["disks"][rank])
        try:
            jobs.run_case(case, config, folder)
        finally:
            os.chdir(before)
