"""`--auto` on this machine, to the end: what is chosen is trained, and a second start goes on with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from options import load_config
from tests.conftest import FAQ
from tests.launching import metrics, run

pytestmark = [pytest.mark.launched, pytest.mark.slow]


@pytest.mark.longest
def test_a_dry_run_trains_nothing_and_the_next_start_trains_what_it_chose(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    save = tmp_path / "run"
    words = ("train_ds.py", "--auto", "--model", make_checkpoint("llama"), "--data", FAQ, "--save", save)
    dry = run(sys.executable, *words, "--dry-run", "max_steps=2")
    assert dry.returncode == 0, dry.stdout[-3000:] + dry.stderr[-3000:]
    assert (
        "timing a layer of each kind" in dry.stdout and "dry run: nothing is trained; python train_ds.py " in dry.stdout
    )
    assert sorted(path.name for path in save.iterdir()) == ["auto.yml", "calibration.json", "plan.png"]
    chosen, written = load_config(save / "auto.yml"), (save / "auto.yml").read_bytes()

    trained = run(sys.executable, *words)
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    assert "auto.yml is there, so the run goes on with it" in trained.stdout
    assert [line["step"] for line in metrics(save)] == [1, 2]
    resolved = load_config(save / "config.yml")
    assert resolved.model_topo == chosen.model_topo
    assert resolved.train_micro_batch_size_per_gpu == chosen.train_micro_batch_size_per_gpu
    assert resolved.bf16.enabled == chosen.bf16.enabled
    assert (save / "auto.yml").read_bytes() == written


def test_it_chooses_and_trains_at_once_and_evaluates_on_what_it_held_out(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    save = tmp_path / "run"
    words = (
        "--auto",
        "--model",
        make_checkpoint("llama"),
        "--data",
        FAQ,
        "--save",
        save,
        "max_steps=1",
        "eval_share=0.1",
    )
    result = run(sys.executable, "train_ds.py", *words)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    lines = metrics(save)
    assert any("loss" in line for line in lines) and any("eval_loss" in line for line in lines)
    assert "are trained on too" not in result.stdout  # the overlap of the two sets
