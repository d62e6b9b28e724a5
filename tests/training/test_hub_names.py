"""A run and a question by a name on the hub, from DeepSpeed's launcher; without a network one line says what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import FAQ, save_tokenizer
from tests.hub import NAME, serving
from tests.launching import DEEPSPEED, error_lines, metrics, run, topology, write_config


@pytest.mark.launched
@pytest.mark.slow
def test_a_model_is_trained_by_its_name(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint("llama")
    save_tokenizer(folder)
    keys = {"data_path": str(FAQ), "model_topo": topology((2, 1)), "max_steps": 2, "trackers": []}
    config = write_config(tmp_path / "run.yml", model_path=NAME, **keys)
    train: tuple[str | Path, ...] = (*DEEPSPEED, "--num_gpus", "2", "train_ds.py", "--config", config)
    sent: list[str] = []
    with serving(folder, sent) as address:
        environment = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "cache")}
        alone = run(*train, **environment, HF_HUB_OFFLINE="1")
        assert alone.returncode == 2
        command = f"python convert_model.py download --model-name {NAME} --save-path DIR"
        assert any(command in line for line in error_lines(alone)), alone.stderr
        done = run(*train, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2]
    weights = [name for name in sent if name.endswith(".safetensors")]
    assert len(weights) == len(set(weights)) > 0
    assert f"model_path: {NAME}" in (tmp_path / "run" / "config.yml").read_text()
    asked = ("--prompt", "hello", "--max-new-tokens", "2", "--greedy")
    answered = run(sys.executable, "demo.py", "--model", NAME, *asked, **environment, HF_HUB_OFFLINE="1")
    assert answered.returncode == 0, answered.stderr
