"""What a launcher adds to the command line is taken by all that it may start."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from options import RunConfig
from options.demo import command_line as demo
from tests.conftest import FAQ
from tests.launching import run, topology, write_config
from training import command_line
from training.launch.agent import free_port

PARSERS: dict[str, Callable[[], Namespace]] = {
    "train_ds.py": partial(command_line.parse_arguments, RunConfig, ""),
    "train_ds_zero.py": partial(command_line.parse_arguments, RunConfig, "", in_stages=False),
    "demo.py": demo.parse_arguments,
}


@pytest.mark.parametrize("script", PARSERS)
@pytest.mark.parametrize("word", ["--local_rank=3", "--local-rank=3"])
def test_both_spellings_of_the_local_rank(script: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["--model", "m"] if script == "demo.py" else ["--config", "c.yml"]
    monkeypatch.setattr(sys, "argv", [script, word, *own])
    assert PARSERS[script]().local_rank == 3


@pytest.mark.launched
@pytest.mark.longest
def test_torchs_older_launcher_trains(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = write_config(
        tmp_path / "run.yml",
        model_path=str(make_checkpoint("llama")),
        data_path=str(FAQ),
        model_topo=topology((2, 1)),
        max_steps=1,
    )
    launcher = (sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2")
    done = run(*launcher, "--master_port", str(free_port()), "train_ds.py", "--config", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 1
