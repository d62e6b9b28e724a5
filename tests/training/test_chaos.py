"""Kills random ranks of a run at random moments, also inside a save, until it is through; nothing may be lost by it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from models.checkpoint.export import pp_to_hg
from tests.conftest import FAQ
from tests.launching import Launch, topology, write_config
from tests.training.checkpoint.test_resume import finished, losses, started, steps_done
from training.checkpoint.folder import RECORD, step_folders

pytestmark = [pytest.mark.launched, pytest.mark.slow]

KILLS = 20
STEPS = 130  # 13 epochs of 80 records in batches of 8


def test_many_kills_change_no_bit(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    records = tmp_path / "records.json"
    records.write_text(json.dumps(json.loads(FAQ.read_text(encoding="utf-8"))[:80]), encoding="utf-8")
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    keys = {
        "model_path": str(make_checkpoint("bloom", **dropout)),
        "data_path": str(records),
        "n_epoches": 13,
        "train_batch_size": 8,
        "save_interval": 3,
        "bf16": {"enabled": True},
        "model_topo": topology((2, 1)),
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3}},
    }
    straight = write_config(tmp_path / "2x1-straight.yml", **keys)
    killed = write_config(tmp_path / "2x1-killed.yml", **keys)
    finished(straight)
    generator = random.Random(11)
    inside = sum(kill_once(killed, generator, inside_save=number % 2 == 0) for number in range(KILLS))
    assert inside >= KILLS // 4, "too few kills hit a save"
    assert steps_done(killed) < STEPS, "the run was through before the last kill"
    finished(killed)

    expected = losses(straight)
    assert len(expected) == STEPS
    assert losses(killed) == expected
    for config in (straight, killed):
        pp_to_hg(config.with_suffix(""), config.with_suffix(".hf"))
    weights = [load_file(config.with_suffix(".hf") / "model.safetensors") for config in (straight, killed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def kill_once(config: Path, generator: random.Random, inside_save: bool) -> bool:
    """Start the run, kill a rank or two with SIGKILL, and wait until all is over; whether that interrupted a save."""
    folder = config.with_suffix("")
    launch = started(config)
    before = steps_done(config)
    goal = before + generator.randrange(1, 7)
    launch.until(lambda: not unfinished(folder))  # what the kill before this one left is set aside first
    chosen = generator.choice([[0], [1], [0, 1]])
    launch.until(lambda: all(ranks(launch, rank) for rank in chosen), pause=0.1)
    victims = [worker for rank in chosen for worker in ranks(launch, rank)]
    launch.until(lambda: unfinished(folder) if inside_save else steps_done(config) >= goal, pause=0.0005)
    for worker in victims:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    interrupted = bool(unfinished(folder))
    launch.end()
    return interrupted


def unfinished(folder: Path) -> list[Path]:
    """Checkpoints that are being written."""
    return [path for path in step_folders(folder) if not (path / RECORD).is_file()]


def ranks(launch: Launch, rank: int) -> list[psutil.Process]:
    """The process of a rank."""
    return [member for member in launch.family() if f"--local_rank={rank}" in _words(member)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
