"""A run that saves in the background has the checkpoints of one that does not, whatever happens to it meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_records
from tests.launching import Launch, metrics, start_supervised, steps_done, topology, write_config
from tests.ranks import Ranks, write_samples
from tests.training.checkpoint.test_resume import finished, losses, workers
from training.checkpoint.folder import RECORD, CheckpointRecord

pytestmark = [pytest.mark.launched, pytest.mark.slow]


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
# One for each of DeepSpeed's optimizers.
CASES: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "fp32": ("pipeline", (2, 1), {"zero_optimization": {"stage": 0}}),
    "bf16": ("pipeline", (1, 2), BF16 | {"zero_optimization": {"stage": 1}}),
    "bf16-0": ("zero", (1, 2), BF16 | {"zero_optimization": {"stage": 0}}),
    "fp16": ("pipeline", (2, 1), FP16 | {"zero_optimization": {"stage": 1}}),
    "zero-3": ("zero", (1, 2), {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
}


def test_a_thread_writes_the_same_files_while_training_goes_on(
    ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    write_samples(tmp_path, 16)
    shared = {
        "model_path": str(make_checkpoint("llama", tie_word_embeddings=True)),
        "data_path": str(tmp_path / "samples.json"),
        "save_path": str(tmp_path),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
    }
    cases = [
        {"name": name, "kind": kind, "config": shared | {"model_topo": topology(dims)} | keys}
        for name, (kind, dims, keys) in CASES.items()
    ]
    ranks.run(2, "saving", cases, tmp_path)
    for name in CASES:
        outcome = json.loads((tmp_path / f"{name}.json").read_text())
        assert RECORD in outcome["files"] and not outcome["early"], name
        assert outcome["differ"] == [], name
        lines = outcome["printed"].splitlines()
        assert len(lines) == 2 and all("warning: latest could not be written: " in line for line in lines), lines


def slow_start(config: Path, step: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Start the run on a disk that is slow at the checkpoint of a step."""
    monkeypatch.setenv("SLOW_STEP", str(step))
    monkeypatch.setenv("SLOW_SECONDS", str(seconds))
    return start_supervised(2, "tests/workers/slow_disk.py", "--config", config)


@pytest.mark.longest
def test_killed_and_stopped_while_a_thread_writes(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "records.json"
    write_records(records, 30)
    shared = {
        "model_path": str(make_checkpoint("bloom", hidden_dropout=0.1, attention_dropout=0.1)),
        "data_path": str(records),
        "n_epoches": 5,
        "save_interval": 5,
        "keep_last": 4,
        "bf16": {"enabled": True},
        "model_topo": topology((2, 1)),
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3}},
    }
    straight = write_config(tmp_path / "2x1-straight.yml", **shared)
    config = write_config(
        tmp_path / "2x1-background.yml", save_async=True, eval_data_path=str(records), eval_interval=12, **shared
    )
    folder = config.with_suffix("")
    finished(straight)

    killed = slow_start(config, 10, 60, monkeypatch)
    killed.until(lambda: steps_done(config) >= 12)  # the evaluation after it waits for the disk
    killed.kill()
    assert list(folder.glob(".step-000010.partial-*"))
    assert [path.parent.name for path in folder.glob(f"step-*/{RECORD}")] == ["step-000005"]
    assert (folder / "latest").read_text() == "step-000005"
    one, other = (CheckpointRecord.read(each / "step-000005") for each in (straight.with_suffix(""), folder))
    assert one and other and one.data == other.data
    assert same_files(straight.with_suffix(""), folder, "step-000005", *one.files.keys() | other.files)

    left = set(folder.glob(".step-000010.*"))
    stopped = slow_start(config, 10, 0.5, monkeypatch)
    # A few steps later the evaluation waits for the disk, so that the request never comes too late.
    stopped.until(lambda: set(folder.glob(".step-000010.*")) - left)
    for trainer in workers(stopped):
        trainer.terminate()
    done = stopped.end()
    assert "stopped after step" in done.stdout and "resumed: " in done.stdout, done.stdout + done.stderr
    last = len(losses(config))
    assert (folder / "latest").read_text() == f"step-{last:06d}" and (folder / "step-000010" / RECORD).is_file()

    resumed = finished(config).stdout
    assert (folder / "measured.json").is_file()  # and yet the parts stay: others would round otherwise
    assert "parts: auto, as at the checkpoint" in resumed
    assert losses(config) == losses(straight)
    assert {line["step"] for line in metrics(folder) if "eval_loss" in line} == {12, 20}
    layers = [file.name for file in (folder / "step-000020").glob("layer_*")]
    assert len(layers) == 5 and same_files(straight.with_suffix(""), folder, "step-000020", *layers)
    assert not list(folder.glob(".step-*"))


def same_files(one: Path, other: Path, *names: str) -> bool:
    """Return whether two runs have the same bytes in files of a checkpoint, the first of `names`."""
    folder, *files = names
    return all((one / folder / file).read_bytes() == (other / folder / file).read_bytes() for file in files)
