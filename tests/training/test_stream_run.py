"""Runs that tokenize while they train, through the real launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from options import load_config
from tests.launching import topology, write_config
from tests.training.checkpoint.test_resume import finished, kill_after, losses
from training.checkpoint.folder import CheckpointRecord, step_folder
from training.checkpoint.resume import check_resumable
from training.errors import ConfigError

STEPS = 10
STREAM = {"stream_gb": 1.0e-5, "max_steps": STEPS}  # less than the records that are handed to a tokenizer together


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for file in range(3):
        lines = [json.dumps({"text": f"{file} and {number}"}) for number in range(600)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.launched
@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_last_bit_and_tokenizes_nothing_twice(
    make_checkpoint: Callable[..., Path], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: dict[str, Any] = {
        "model_path": str(make_checkpoint("llama")),
        "data_path": str(texts),
        "train_batch_size": 200,
        "train_micro_batch_size_per_gpu": 50,
        "max_seq_len": 64,
        "save_interval": 2,
        "model_topo": topology((2, 1)),
    }
    configs = []
    for name in ("straight", "killed"):
        keys = STREAM | {"cache_dir": str(tmp_path / f"{name}-cache")}
        configs.append(write_config(tmp_path / f"2x1-{name}.yml", **shared | keys))
    straight, killed = configs
    printed = finished(straight).stdout
    assert "data: 3 files" in printed
    assert "steps: 10 of 200 samples\n" in printed
    made = [number for number in range(1, 10) if f"data: window {number}, in epoch" in printed]
    assert made == [1, 2, 3, 4, 5], "2,000 samples: an epoch has four windows, the last one a smaller one"
    assert "data: window 5, in epoch 2" in printed
    left = list((tmp_path / "straight-cache" / "streams").glob("*/datasets/*"))
    assert not left, "removed when the run is done"

    kill_after(7, killed, monkeypatch)
    printed = finished(killed).stdout
    assert "resumed: " in printed
    assert "data: window 1, in epoch" not in printed
    assert losses(killed) == losses(straight)
    assert [step for step, _ in losses(straight)] == list(range(1, STEPS + 1))

    saved = step_folder(killed.with_suffix(""), STEPS)
    record = CheckpointRecord.read(saved)
    assert record is not None
    assert [samples for samples, *_ in record.data.windows] == [512, 512, 512, 264, 512]
    with pytest.raises(ConfigError, match=r"stream_gb: 1.0, but .* was trained with 1e-05"):
        check_resumable(saved, record, record.data, load_config(killed, ["stream_gb=1.0"]))


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"max_steps": None}, "max_steps: expected a number"),
        ({"packing": "dataset"}, "packing: dataset packs whole epochs"),
        ({"stream_gb": 0}, "stream_gb"),
    ],
)
def test_what_a_stream_asks_for(keys: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yml", model_path="m", data_path="d", **STREAM | keys)
    with pytest.raises(ConfigError, match=complaint):
        load_config(config)
