"""`train_micro_batch_size_per_gpu: auto` takes the fastest rows that fit, tells them, and keeps them on resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from options.planner import micro_batch
from options.planner.inputs import Basis, Workload
from options.planner.measurements import Calibration
from options.planner.micro_batch import ROWS, choose_rows
from options.planner.plan import Plan
from options.planner.search import SIZES
from tests.conftest import TINY, write_records
from tests.launching import metrics, supervised, topology, write_config
from tests.options.planner.helpers import config_of, llama, spec_of
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.metrics.devices import CPU, Device, parse_devices
from training.trained import with_trained


def plan_of(folder: Path, config: TrainConfig, device: Device, rows: int) -> Plan:
    config = config.model_copy(update={ROWS: rows})
    return Plan.make(Basis(config, llama(folder), Workload.assumed(config), device))


@pytest.mark.parametrize(
    ("devices", "stages", "keys", "several"),
    [
        ("A100-80G", 2, {"max_seq_len": 256, "train_batch_size": 256}, True),
        ("A100-80G", 8, {"max_seq_len": 2048, "train_batch_size": 16}, False),  # the bubble is worse
    ],
)
def test_the_fastest_rows_that_fit_are_taken(
    devices: str, stages: int, keys: dict[str, Any], several: bool, tmp_path: Path
) -> None:
    keys = {ROWS: "auto", **keys}
    config, device = config_of(tmp_path, stages, **keys), parse_devices(devices)[1]
    rows, line = choose_rows(config, llama(tmp_path), device, Workload.assumed, in_stages=True)
    plans = {each: plan_of(tmp_path, config, device, each) for each in SIZES if not config.train_batch_size % each}
    fastest = min(plan.seconds for plan in plans.values() if plan.fits)
    assert plans[rows].fits and plans[rows].seconds <= fastest / micro_batch.ALIKE
    assert (rows > 1) == several
    assert line.startswith(f"micro-batch: auto, {rows} row")


@pytest.mark.parametrize("keys", [{"zero_optimization": {"stage": 3}}, {"schedule": "weight_streaming"}])
def test_zero_and_weight_streaming_choose_too(keys: dict[str, Any], tmp_path: Path) -> None:
    keys = {"max_seq_len": 256, "train_batch_size": 64, "fp16": {"enabled": False}, "bf16": {"enabled": True}, **keys}
    stages = 2 if "schedule" in keys else 1
    config = config_of(tmp_path, stages, 2 // stages, **keys, **{ROWS: "auto"})
    in_stages = "schedule" in keys
    rows, line = choose_rows(config, llama(tmp_path), parse_devices("A100-80G")[1], Workload.assumed, in_stages)
    assert rows > 1 and f"{rows} rows, " in line  # each micro-batch moves all weights


def test_only_what_divides_the_batch_is_taken(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"max_seq_len": 256, "train_batch_size": 24, ROWS: "auto"}
    config = config_of(tmp_path, 2, 4, **keys)
    rows, _ = choose_rows(config, llama(tmp_path), parse_devices("A100-80G")[1], Workload.assumed, in_stages=True)
    assert rows in (1, 2)


def test_where_speeds_are_not_known_layers_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes as long for four rows as for one."""
    timed: list[tuple[int, list[int]]] = []

    def measured(config: TrainConfig, spec: Any, workload: Workload, rounds: int, kinds: set[int]) -> Calibration:
        timed.append((workload.rows, sorted(kinds)))
        factor = 1 / workload.rows
        return Calibration.of(config, spec, {str(kind): (factor, factor) for kind in kinds}, 1.0)

    monkeypatch.setattr(micro_batch, "calibrate", measured)
    keys: dict[str, Any] = {"train_batch_size": 64, "max_seq_len": 256, "fp16": {"enabled": False}, ROWS: "auto"}
    config = config_of(tmp_path, 2, **keys)
    rows, _ = choose_rows(config, llama(tmp_path), CPU, Workload.assumed, in_stages=True)
    assert timed == [(1, [0, 1, 33]), (4, [1])] and rows >= 4


def test_who_leaves_the_key_out_learns_what_that_costs(tmp_path: Path) -> None:
    device, keys = parse_devices("A100-80G")[1], {"max_seq_len": 256, "train_batch_size": 256}
    config = config_of(tmp_path, 2, **keys)
    line = micro_batch.advice(config, llama(tmp_path), device, Workload.assumed, in_stages=True)
    rows, _ = choose_rows(config, llama(tmp_path), device, Workload.assumed, in_stages=True)
    gain = plan_of(tmp_path, config, device, 1).seconds / plan_of(tmp_path, config, device, rows).seconds - 1
    assert gain >= 0.1
    assert line == f"micro-batch: 1 row by default; {rows} are {gain:.0%} faster by plan: {ROWS}: auto chooses"
    few = config_of(tmp_path, 8, max_seq_len=2048, train_batch_size=16)
    assert micro_batch.advice(few, llama(tmp_path), device, Workload.assumed, in_stages=True) == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 4 contradicts .*auto; leave it out"),
        ({ROWS: "some"}, "expected a number of rows, or auto"),
    ],
)
def test_what_auto_does_not_know_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        config_of(tmp_path, 2, **{ROWS: "auto"} | keys)


@pytest.mark.launched
@pytest.mark.slow
def test_a_run_chooses_once(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model, data = make_checkpoint("llama"), tmp_path / "records.json"
    write_records(data, 8)
    keys: dict[str, Any] = {"model_path": str(model), "data_path": str(data), "model_topo": topology((2, 1))}
    keys |= {ROWS: "auto", "train_batch_size": 8, "eval_share": 0.2, "packing": False}
    path = write_config(tmp_path / "run.yml", **keys, max_steps=1)
    first = supervised(2, "train_ds.py", "--config", path)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    assert first.stdout.count("micro-batch: auto, ") == 1
    rows = yaml.safe_load((tmp_path / "run" / "config.yml").read_text(encoding="utf-8"))[ROWS]
    assert f"micro-batch: auto, {rows} row" in first.stdout
    write_config(tmp_path / "run.yml", **keys, max_steps=2)
    second = supervised(2, "train_ds.py", "--config", path)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert "micro-batch: auto" not in second.stdout and "train_micro_batch" not in second.stdout
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2]


@pytest.mark.parametrize("keys", [{"lora": {"r": 2}}, {"freeze": ["embed_tokens"]}], ids=["lora", "freeze"])
def test_a_frozen_embedding_is_timed_too(keys: dict[str, Any], tmp_path: Path) -> None:
    """It has no backward pass to compare with a planned one."""
    keys |= {"train_batch_size": 8, "max_seq_len": 16, "fp16": {"enabled": False}, ROWS: "auto"}
    config = config_of(tmp_path, 2, use_grad_ckpt=False, **keys)
    spec = with_trained(spec_of(tmp_path, TINY | {"model_type": "llama"}), config)
    rows, line = choose_rows(config, spec, CPU, Workload.assumed, in_stages=True)
    assert line.startswith(f"micro-batch: auto, {rows} row")
