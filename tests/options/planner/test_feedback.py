"""What steps took corrects a plan, counts only for what it was measured of, and better parts are taken by a rule."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, RecvActivation, SendActivation

from common.log import Log
from models.spec import ModelSpec
from options.planner import feedback
from options.planner.command import plan_run
from options.planner.feedback import (
    GAIN,
    Feedback,
    StageClock,
    better_parts,
    comparison,
    layer_factors,
    measure,
    stage_seconds,
)
from options.planner.inputs import Basis, Workload
from options.planner.measurements import MEASURED_FILE, Measured
from options.planner.plan import Plan, best_parts
from options.planner.planning import choose
from tests.conftest import TINY
from tests.launching import topology
from tests.options.planner.helpers import config_of, llama, spec_of
from tests.options.planner.test_command import arguments
from training.checkpoint.folder import CheckpointRecord, DataOrder
from training.config.keys import TrainConfig
from training.metrics.devices import Device, parse_devices, this_device
from training.schedule.zero_bubble import WeightPass
from training.topology import Division, Topology

STEPS = (3, 7)
DEVICE = parse_devices("A100-40G")[1]


def plan_of(config: TrainConfig, spec: ModelSpec, parts: list[int], device: Device = DEVICE) -> Plan:
    return Plan(Basis.of_run(config, spec, Workload.assumed(config), device)[0], parts)


def keep(measured: Measured, config: TrainConfig) -> None:
    Path(config.save_path).mkdir(exist_ok=True)
    (Path(config.save_path) / MEASURED_FILE).write_text(measured.model_dump_json(), encoding="utf-8")


@pytest.mark.parametrize("keys", [{}, {"schedule": "dualpipev"}, {"use_grad_ckpt": "auto"}], ids=str)
def test_a_corrected_plan_has_the_times_and_peaks_that_were_measured(keys: dict[str, Any], tmp_path: Path) -> None:
    spec, config = llama(tmp_path), config_of(tmp_path, 4, train_batch_size=32, **keys)
    plan = plan_of(config, spec, best_parts(plan_of(config, spec, []).basis))
    seconds = [factor * planned for factor, planned in zip([1.1, 1.7, 0.8, 2.5], stage_seconds(plan), strict=True)]
    peaks = [stage.memory.peak + more for stage, more in zip(plan.stages, [10**9, -(10**9), 5, 0], strict=True)]
    keep(measure(plan, STEPS, seconds, peaks), config)
    corrected = plan_of(config, spec, plan.parts)
    lines = comparison(plan, measure(plan, STEPS, seconds, peaks))
    assert len(lines) == 6 and lines[0].startswith("plan vs. measured (steps 3-7): ") and "stage 3 takes" in lines[-1]
    assert f"(planned {plan.stages[1].memory.peak / 1e9:.2f} GB)" in lines[2]
    assert stage_seconds(corrected) == pytest.approx(seconds)
    assert [stage.memory.peak for stage in corrected.stages] == [
        max(stage.memory.peak, peak) for stage, peak in zip(plan.stages, peaks, strict=True)
    ], "planned memory only grows"
    again = measure(corrected, STEPS, seconds, peaks)  # what is measured of a corrected plan corrects the estimates too
    assert again.layers == pytest.approx(measure(plan, STEPS, seconds, peaks).layers)
    assert again.beyond == [10**9, 0, 5, 0]


def test_a_slow_head_is_blamed_and_not_the_blocks_beside_it() -> None:
    costs, alike = [0.1, *[1.0] * 12, 2.0], [0, *[1] * 12, 13]
    held = [range(5), range(5, 9), range(9, 12), range(12, 14)]
    truth = [0.1, *[1.5] * 12, 9.0]  # blocks take half as long again, the head four and a half times
    factors = layer_factors(costs, alike, held, [sum(truth[layer] for layer in layers) for layers in held])
    assert factors[1:13] == pytest.approx([1.5] * 12, rel=0.03)
    assert factors[13] == pytest.approx(4.5, rel=0.03)


def test_a_slow_stage_keeps_what_no_kind_of_layer_explains() -> None:
    held = [range(4), range(4, 8), range(8, 12)]
    factors = layer_factors([1.0] * 12, [0] * 12, held, [4.0, 8.0, 4.0])
    assert factors == pytest.approx([1.0] * 4 + [2.0] * 4 + [1.0] * 4)


def test_other_parts_are_better_only_where_they_save_enough_and_fit(tmp_path: Path) -> None:
    spec, config = llama(tmp_path), config_of(tmp_path, 4, train_batch_size=32)
    plan = plan_of(config, spec, [10, 8, 8, 8])
    planned, peaks = stage_seconds(plan), [stage.memory.peak for stage in plan.stages]

    def better(slower: float, device: Device = DEVICE) -> tuple[list[int], float] | None:
        seconds = [slower * planned[0], *planned[1:]]
        measured = measure(plan, STEPS, seconds, peaks)
        return better_parts(Plan(replace(plan.basis, device=device, measured=measured), plan.parts))

    even = better(planned[1] / planned[0])
    assert even is None, "no parts beat equal stages"
    found = better(2.0)
    assert found and found[0][0] < 10 and found[1] > GAIN
    assert better(2.0, replace(DEVICE, memory=min(peaks) // 2)) is None, "they would not fit"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": parse_devices("H100")[1]}, "another device: A100-40G then, H100-80G now"),
        ({"keys": {"train_micro_batch_size_per_gpu": 2}}, "another rows: 1 then, 2 now"),
        ({"keys": {"max_seq_len": 1024}}, "another length: 2048 then, 1024 now"),
        ({"keys": {"fp16": {"enabled": False}}}, "another fp16"),
        ({"keys": {"use_grad_ckpt": False}}, "another use_grad_ckpt: True then, False now"),
        ({"layers": 30}, "another model"),
        ({"text": "{"}, "ignored: damaged"),
        ({"text": "[]"}, "ignored: damaged"),
        ({"fields": {"layers": [1.0]}}, "ignored: damaged"),
        ({"fields": {"better": [1, 33]}}, "ignored: damaged"),
        ({"fields": {"seconds": [1.0, -1.0, 1.0, 1.0]}}, "ignored: damaged"),
    ],
    ids=str,
)
def test_a_measurement_of_something_else_is_passed_over_in_one_line(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec, config = llama(tmp_path), config_of(tmp_path, 4)
    plan = plan_of(config, spec, [9, 8, 8, 9])
    measured = measure(plan, STEPS, stage_seconds(plan), [10**10] * 4)
    keep(measured, config)
    assert Basis.of_run(config, spec, Workload.assumed(config), DEVICE)[0].measured == measured
    if "fields" in changed:
        changed["text"] = json.dumps(measured.model_dump(mode="json") | changed["fields"])
    if "text" in changed:
        (Path(config.save_path) / MEASURED_FILE).write_text(changed["text"], encoding="utf-8")
    if "layers" in changed:
        spec = llama(tmp_path, num_hidden_layers=changed["layers"])
    config = config_of(tmp_path, 4, **changed.get("keys", {}))
    basis, lines = Basis.of_run(config, spec, Workload.assumed(config), changed.get("device", DEVICE))
    assert basis.measured is None
    assert len(lines) == 1 and message in lines[0]


def test_plan_names_what_corrects_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, config = llama(tmp_path), config_of(tmp_path, 8)
    plan = plan_of(config, spec, [5, 4, 4, 4, 4, 4, 4, 5], this_device())
    keep(measure(plan, STEPS, [1.0, *[0.5] * 7], [2 * 10**9] * 8), config)
    plan_run(config, arguments())
    printed = capsys.readouterr().out
    assert "times and peaks: corrected by steps 3-7 (measured.json)" in printed and "speed: " in printed
    plan_run(config, arguments(devices="8xA100-40G"))
    printed = capsys.readouterr().out
    assert "measured.json: ignored: measured with another device: CPU then, A100-40G now" in printed
    assert "times: estimated" in printed


def test_a_run_that_goes_on_changes_its_parts_only_when_asked(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {**TINY, "model_type": "llama", "num_hidden_layers": 8})
    keys: dict[str, Any] = {"fp16": {"enabled": False}, "max_seq_len": 64, "train_batch_size": 8, "save_interval": 5}
    auto, moving = config_of(tmp_path, 2, **keys), config_of(tmp_path, 2, rebalance=True, **keys)
    order = DataOrder(samples=8, fingerprint="", seed=42, train_batch_size=8, dataloader_drop_last=False)
    divided = Topology(stages=2, replicas=1, zero_stage=1, parts=[8, 2])
    saved = CheckpointRecord(step=5, topology=divided, data=order, settings={"seed": 42})

    def parts(config: TrainConfig, record: CheckpointRecord | None) -> tuple[list[int], str]:
        division = choose(config, spec, DEVICE, saved=record)
        return division.topology.parts, division.report[0]

    estimated = parts(auto, None)
    assert "by estimated costs" in estimated[1]
    assert parts(moving, saved) == parts(auto, saved) == ([8, 2], "parts: auto, as at the checkpoint")
    plan = plan_of(auto, spec, [8, 2])
    first, second = stage_seconds(plan)
    measured = measure(plan, STEPS, [first, 9 * second], [1, 1])
    measured.better = [3, 7]
    keep(measured, auto)
    assert parts(auto, saved) == ([8, 2], "parts: auto, as at the checkpoint; rebalance: true takes [3, 7]")
    assert parts(moving, saved)[0] == [3, 7]
    fresh, why = parts(auto, None)
    assert fresh != estimated[0] and "by measured costs, of the run's own steps" in why
    named = saved.model_copy(update={"settings": {"seed": 42, "model_topo.parts": [8, 2]}})
    assert parts(auto, named)[0] == fresh, "auto is new to this run"
    wider = config_of(tmp_path, 4, **keys)
    assert len(parts(wider, saved)[0]) == 4


def feedback_of(config: TrainConfig, spec: ModelSpec, division: Division, done: int, steps: int) -> Feedback:
    task: Any = SimpleNamespace(spec=spec, known_loader=None)
    progress = SimpleNamespace(config=config, done=done, total_steps=steps)
    job: Any = SimpleNamespace(progress=progress, division=division, log=Log(highlight=False, width=200))
    measuring = Feedback(task, rebalance=True)
    measuring.on_build(job)
    return measuring


def test_a_run_moves_twice_at_most_and_no_failure_of_the_plan_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(tmp_path, {**TINY, "model_type": "llama", "num_hidden_layers": 8})
    keys: dict[str, Any] = {"fp16": {"enabled": False}, "max_seq_len": 64, "train_batch_size": 8, "save_interval": 5}
    config = config_of(tmp_path, 2, rebalance=True, **keys)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    other = (1, 0.001, 10**9, this_device())
    monkeypatch.setattr(feedback, "gather", lambda value: [value, other] if isinstance(value, tuple) else [value])

    def moves(parts: list[int], steps: int = 7) -> bool:
        division = Division(Topology(stages=2, replicas=1, zero_stage=1, parts=parts))
        measuring = feedback_of(config, spec, division, 0, steps)
        measuring._clock.seconds = [0.1, 0.2, 9.0, 0.1, 0.1]
        run: Any = SimpleNamespace(trainer=SimpleNamespace(stage=0), restart=None)
        nothing: Any = None
        for step in range(steps - 1, steps + 1):
            assert run.restart is None, "not all steps that count are done"
            metrics: Any = SimpleNamespace(step=step)
            measuring.on_step_end(run, metrics, nothing)
        return run.restart is not None

    assert not moves([9, 1], steps=6), "too short to be measured, which is not worth a line"
    assert capsys.readouterr().out == ""
    assert not moves([9, 1])
    assert "warning: plan check failed: FileNotFoundError" in capsys.readouterr().out
    (tmp_path / "run").mkdir()
    assert [moves([9, 1]), moves([8, 2]), moves([7, 3])] == [True, True, False]
    printed = capsys.readouterr().out
    assert printed.count("faster; taken at the next checkpoint") == 2 and "faster; not taken, after 2 times" in printed
    assert printed.count("stage 0: 100 ms a micro-batch, 99.0% of all stages' time") == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_topo": topology((1, 2))}, "expected several stages"),
        (
            {"model_topo": {"process_topology": {"dims": [2, 1]}, "parts": [3, 2]}},
            "model_topo.parts: auto, or rebalance: false",
        ),
        ({"resume": "none"}, "expected resume: auto"),
        ({"save_interval": None}, "expected save_interval or save_minutes"),
        ({"deterministic": True}, "expected deterministic: false"),
    ],
    ids=str,
)
def test_what_cannot_be_rebalanced_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    config_of(tmp_path, 2, rebalance=True, save_interval=5)
    with pytest.raises(ValueError, match=f"rebalance: .*{message}"):
        config_of(tmp_path, 2, **{"rebalance": True, "save_interval": 5} | keys)


def test_a_stage_clock_counts_work_and_no_waiting() -> None:
    def work(*_: Any, **__: Any) -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    def wait(*_: Any, **__: Any) -> None:
        time.sleep(0.2)

    instructions: dict[type, Callable[..., None]] = {
        ForwardPass: work, BackwardPass: work, WeightPass: work, RecvActivation: wait, SendActivation: wait
    }  # fmt: skip
    engine: Any = SimpleNamespace(device=torch.device("cpu"), _INSTRUCTION_MAP=instructions)
    clock = StageClock()
    for micro_batches in (1, 3):
        with clock.step(engine, micro_batches):
            for _ in range(micro_batches):
                for execute in engine._INSTRUCTION_MAP.values():
                    execute(engine, buffer_id=0)
        assert engine._INSTRUCTION_MAP is instructions
    assert all(0.06 <= seconds < 0.2 for seconds in clock.seconds) and len(clock.seconds) == 2
