"""A run that was killed resumes to the last bit, through the real launcher and with real kills."""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.conftest import write_records
from tests.launching import (
    Launch,
    metrics,
    start_supervised,
    steps_done,
    topology,
    trained_weights,
    write_config,
)
from tests.models.helpers import assert_same_bits
from tests.ranks import Ranks
from training.checkpoint.deepspeed_files import read_mapped
from training.checkpoint.folder import CheckpointRecord

pytestmark = pytest.mark.launched

STEPS = 20  # five epochs of 30 records in batches of 8
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
FP32 = {"zero_optimization": {"stage": 0}}
CASES: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "1x1-fp32": ((1, 1), FP32, "llama"),
    "2x1-bf16-dropout": ((2, 1), BF16, "bloom"),
    "2x1-fp32": ((2, 1), FP32, "llama"),
    "2x2-bf16": ((2, 2), BF16, "llama"),
    "1x1-bf16": ((1, 1), BF16, "llama"),
    "2x2-fp32": ((2, 2), FP32 | {"zero_optimization": {"stage": 1}}, "llama"),
    "1x2-shared-rows": ((1, 2), BF16 | {"model_topo": topology((1, 2)) | {"sequence": 2}}, "bloom"),
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "records.json"
    write_records(path, 30)
    return path


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {
        "llama": make_checkpoint("llama", tie_word_embeddings=True),
        "bloom": make_checkpoint("bloom", **DROPOUT),
    }


def started(config: Path, *words: str, script: str = "train_ds.py") -> Launch:
    """The run of a config whose name begins with its `dims`."""
    dims = config.stem.split("-")[0].split("x")
    return start_supervised(int(dims[0]) * int(dims[1]), script, "--config", config, *words)


def kill_after(step: int, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a run and kill all of its processes after a step. Rank 0 waits in the next one: no test comes too late."""
    with monkeypatch.context() as patch:
        patch.setenv("FAULT", f"waits:0:{step + 1}")
        patch.setenv("WAITS_FOR", "/nonexistent")
        launch = started(config, script="tests/workers/faulty.py")
    launch.until(lambda: steps_done(config) and step in dict(losses(config)))
    launch.kill()


def settings(models: dict[str, Path], records: Path, name: str) -> dict[str, Any]:
    dims, keys, model = CASES[name]
    return {
        "model_path": str(models[model]),
        "data_path": str(records),
        "n_epoches": 5,
        "save_interval": 5,
        "model_topo": topology(dims),
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}},
    } | keys


def finished(config: Path) -> subprocess.CompletedProcess[str]:
    done = started(config).end()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def losses(config: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(config.with_suffix("")) if "loss" in line]


@pytest.mark.longest  # test_background.py and tests/training/test_chaos.py have killed runs for `make test-slow`
@pytest.mark.parametrize("name", CASES)
def test_killed_run_goes_on_to_the_last_bit(
    name: str, models: dict[str, Path], records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that is killed evaluates as well, which must not change it."""
    shared = settings(models, records, name)
    straight = write_config(tmp_path / f"{name}.yml", **shared)
    killed = write_config(tmp_path / f"{name}-killed.yml", eval_data_path=str(records), eval_interval=3, **shared)
    finished(straight)
    kill_after(12, killed, monkeypatch)
    resumed = finished(killed).stdout
    assert "resumed: " in resumed
    if name.startswith("2x1"):  # steps were measured, and yet the parts stay: others would round otherwise
        assert (killed.with_suffix("") / "measured.json").is_file()
        assert "parts: auto, as at the checkpoint" in resumed and "plan: stage 1" in resumed

    expected = losses(straight)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert losses(killed) == expected
    assert_same_bits(trained_weights(killed), trained_weights(straight))


def workers(launch: Launch) -> list[psutil.Process]:
    """The processes that train, below the supervisor and its agent."""
    _, *below = launch.family()
    return [member for member in below if "--config" in member.cmdline()]


def resummed(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the flat tensors of a checkpoint's file, and every checksum with it."""

    def walk(value: Any) -> Any:
        if torch.is_tensor(value) and value.dim() == 1:
            return change(value).clone()
        if isinstance(value, dict):
            value.update({key: walk(each) for key, each in value.items()})
        return [walk(each) for each in value] if isinstance(value, list) else value

    path, about = folder / name, folder / "checkpoint.json"
    torch.save(walk(read_mapped(path)), changed := path.with_suffix(".changed"))
    changed.replace(path)  # only now, as the old file is mapped
    fields = json.loads(about.read_text())
    fields["files"][name] = {"size": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}
    record = CheckpointRecord.model_validate(fields)
    about.write_text(record.model_copy(update={"crc32": record.checksum()}).model_dump_json(exclude_unset=True))


@pytest.mark.slow
def test_files_that_do_not_fit_each_other_are_refused_in_a_line(
    ranks: Ranks, models: dict[str, Path], records: Path, tmp_path: Path
) -> None:
    """Files that were changed together with their checksums; torch finds that sizes differ."""
    keys = settings(models, records, "1x1-bf16")
    config = write_config(tmp_path / "cut.yml", **keys | {"max_steps": 1})
    assert ranks.train(1, config)["error"] is None
    whole, folder = tmp_path / "whole", config.with_suffix("") / "step-000001"
    shutil.copytree(folder, whole)
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "random-000.pt"):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        resummed(folder, next(path.name for path in folder.glob(f"*{name}")), lambda tensor: tensor[:-8])
        line = ranks.train(1, write_config(config, **keys | {"max_steps": 2}))["error"]
        assert line.startswith(f"{folder}: its files do not fit each other: ") and len(line.splitlines()) == 1
