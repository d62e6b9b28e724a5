"""Cases on the pretend device: models and samples for them, and the processes that run them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FAQ
from tests.launching import start, topology
from tests.models.cases import CASES
from tests.models.checkpoint.test_quantized import to_fp8
from tests.ranks import LENGTHS, write_samples
from training.launch.agent import free_port

Run = Callable[[list[dict[str, Any]], int], dict[str, list[dict[str, Any]]]]
MakeCase = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def make_case(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> MakeCase:
    """Return a function that makes a case of `tests.pretend.run_cases` for a model of `tests.models.cases`."""
    folder = tmp_path_factory.mktemp("pretend-samples")
    write_samples(folder)

    @cache
    def model(name: str) -> Path:
        case = CASES[name.removesuffix("-fp8")]
        folder = make_checkpoint(case.model_type, **case.changes)
        if name.endswith("-fp8"):
            to_fp8(folder)
        return folder

    def make(
        name: str,
        model_name: str,
        work: str = "pipeline",
        kernel: str | None = None,
        planted: str | None = None,
        hang: str | list[str] | None = None,
        **keys: Any,
    ) -> dict[str, Any]:
        config = {
            "model_path": str(model(model_name)),
            "data_path": str(FAQ if work == "job" else folder / "samples.json"),
            "save_path": str(folder / name),
            "train_batch_size": len(LENGTHS),
            "max_seq_len": 64,
            "pack_len": 64,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        case = {"name": name, "work": work, "kernel": kernel, "planted": planted, "config": config | keys}
        return case | ({"hang": hang} if hang else {})

    return make


def end_together(cases: list[dict[str, Any]], processes: int, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run cases in N processes; return what each rank printed."""
    path = folder / "cases.json"
    for case in cases:
        case["config"] = {"model_topo": topology((processes, 1))} | case["config"]
    path.write_text(json.dumps(cases))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    common["LOCAL_WORLD_SIZE"] = str(processes)
    ranks = [
        start(sys.executable, "-m", "tests.pretend.worker", path, RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(processes)
    ]
    return [launch.end() for launch in ranks]


@pytest.fixture(scope="module")
def run_pretended(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs cases in N processes of their own, and returns what each rank found, by case."""

    def run(cases: list[dict[str, Any]], processes: int) -> dict[str, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("pretended")
        for result in end_together(cases, processes, folder):
            assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return {
            case["name"]: [
                json.loads((folder / f"{case['name']}.{rank}.json").read_text()) for rank in range(processes)
            ]
            for case in cases
        }

    return run
