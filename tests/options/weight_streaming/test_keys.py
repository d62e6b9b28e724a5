"""The schedule belongs to the option: its rules come with it, and without it a config that names it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from options import RunConfig
from options.weight_streaming import StreamingKeys
from tests.conftest import ROOT
from tests.launching import write_config
from tests.training.config.test_config import refusal, write
from training.checkpoint.saved_slices import SavedOptimizer
from training.config.deepspeed_keys import describe_ignored_keys
from training.config.keys import TrainConfig
from training.config.yaml_file import load_config_of
from training.errors import ConfigError
from training.topology import Topology

STREAMED: dict[str, Any] = {"schedule": "weight_streaming"}

# What stands beside it, and how the refusal begins behind the file's name.
MISTAKES = [
    (
        "model_topo: {sequence: 2, process_topology: {dims: [1, 2]}}",
        "model_topo: not with schedule: weight_streaming; ",
    ),
    ("offload_activations: true", "offload_activations: not with schedule: weight_streaming; expected fals"),
    ("offload_gradients: true", "offload_gradients: not with schedule: weight_streaming; expected false, as "),
    ("rebalance: true", "rebalance: not with schedule: weight_streaming; expected false, as GPUs take turns at all"),
    ("bf16: {bf16_optimizer_states: true}", "bf16.bf16_optimizer_states: not without bf16.enabled"),
    ("row_chunk: auto", "row_chunk: auto: not with schedule: weight_streaming; expected a number of tokens"),
    (
        "optimizer: {type: Adafactor}\nzero_optimization: {stage: 0}",
        "schedule: weight_streaming cuts the weights, which Adafactor needs whole; expected another schedule",
    ),
]


def read(folder: Path, kind: type[TrainConfig], **keys: Any) -> TrainConfig:
    return load_config_of(kind, write_config(folder / "run.yml", model_path="m", data_path="d", **keys))


@pytest.mark.parametrize(("lines", "refused"), MISTAKES)
def test_what_turns_do_not_know_is_refused(lines: str, refused: str, tmp_path: Path) -> None:
    path = write(tmp_path, "schedule: weight_streaming", lines)
    assert refusal(path).startswith(f"{path}: {refused}")


def test_it_needs_a_pipeline_but_no_zero(tmp_path: Path) -> None:
    offloads = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    config = read(tmp_path, RunConfig, **STREAMED, **offloads)  # where the optimizer is on the host anyway
    assert config.weights_on_host and not read(tmp_path, RunConfig).weights_on_host
    assert read(tmp_path, RunConfig, **STREAMED).zero_optimization.stage == 0
    states = read(tmp_path, RunConfig, **STREAMED, bf16={"enabled": True, "bf16_optimizer_states": True})
    assert not describe_ignored_keys(states, plan=True)
    config.check_entry_point(in_stages=True)
    with pytest.raises(ConfigError, match=r"^schedule: weight_streaming is a pipeline's; expected train_ds\.py, or no"):
        config.check_entry_point(in_stages=False)


def test_rows_may_come_in_chunks(tmp_path: Path) -> None:
    config = read(tmp_path, RunConfig, **STREAMED, row_chunk=4096)
    assert isinstance(config, RunConfig) and config.row_chunk == 4096


def test_without_the_option_its_schedule_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run\.yml: schedule: .*1f1b.*dualpipev.*, found 'weight_streaming'$"
    ) as said:
        read(tmp_path, TrainConfig, **STREAMED)
    assert "\n" not in str(said.value)
    with pytest.raises(ConfigError, match=r"schedule: weight_streaming: options\.planner, which cuts the turns, is "):
        read(tmp_path, StreamingKeys, **STREAMED)


@pytest.mark.parametrize("folder", ["common", "data", "models", "training"])
def test_the_core_does_not_name_it(folder: str) -> None:
    files = (ROOT / folder).rglob("*.py")
    assert [file for file in files if "weight_streaming" in file.read_text(encoding="utf-8").lower()] == []


@pytest.mark.parametrize(
    ("names", "pieces"),
    [
        ([["0.a", "1.a"], ["2.a"]], False),
        ([["0.a", "1.a", "2.a"], ["0.a", "1.a", "2.a"]], True),
        ([["2.a"], ["2.a"]], True),  # all that is trained is the last stage's
        ([[], ["2.a"]], False),
    ],
)
def test_files_say_whether_each_process_had_a_piece_of_every_weight(
    names: list[list[str]], pieces: bool, tmp_path: Path
) -> None:
    """So such a checkpoint resumes where nobody knows the option."""
    for stage, of_stage in enumerate(names):
        torch.save({"parameter_names": of_stage}, tmp_path / f"mp_rank_{stage:02d}_model_states.pt")
    saved = SavedOptimizer(tmp_path, Topology(stages=2, replicas=1, zero_stage=0, parts=[2, 1]))
    assert saved.in_pieces == pieces
