"""Devices of several kinds in one run: each stage is planned with its own, and one kind as ever."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from options import load_config
from options.planner.auto.search import Machine
from options.planner.command import plan_run
from options.planner.communication import Fabric
from options.planner.costs import layer_times
from options.planner.inputs import Basis
from options.planner.measurements import Calibration
from options.planner.memory import MemoryModel
from options.planner.plan import Plan, best_parts
from options.planner.planning import Planning, choose, loss_of_parts
from options.planner.search import more_stages, search
from options.planner.tables import plan_summary
from tests.options.planner.auto.helpers import UNTRAINED, auto, outline
from tests.options.planner.helpers import basis_of, config_of, llama
from tests.options.planner.test_command import arguments
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.metrics.devices import Device, devices_here, mixed, parse_devices
from training.topology import Division
from training.unplanned import split_as_configured

OWN = "2x{tflops: 119, memory_gib: 24, bandwidth_gb_s: 864, link_gb_s: 25}"
PAIR = "1xRTX4090,1xRTX3090"


def basis(folder: Path, devices: str, stages: int = 2, replicas: int = 1, blocks: int = 6, **keys: Any) -> Basis:
    spec = llama(folder, num_hidden_layers=blocks)
    return basis_of(spec, config_of(folder, stages, replicas, train_batch_size=16, **keys), devices)


def with_parts(known: Basis, parts: list[int]) -> Basis:
    return replace(known, config=known.config.with_parts(parts))


def test_devices_are_listed_in_the_order_of_the_ranks() -> None:
    count, devices = parse_devices(f"2xRTX4090, RTX3090,{OWN},1x4090")
    names = ["RTX4090-24G", "RTX4090-24G", "RTX3090-24G", "GPU-24G", "GPU-24G", "RTX4090-24G"]
    assert (count, [device.name for device in devices.each]) == (6, names)
    assert devices.name == "2xRTX4090-24G,1xRTX3090-24G,2xGPU-24G,1xRTX4090-24G"
    assert [kind.name for kind in devices.kinds] == ["RTX4090-24G", "RTX3090-24G", "GPU-24G"]


def test_a_mix_is_as_weak_as_its_weakest() -> None:
    (_, large), (_, small), (_, devices) = map(parse_devices, ("A100-80G", "RTX4090", "A100-80G,RTX4090"))
    assert (devices.memory, devices.fp8) == (small.memory, 0)
    assert (devices.link, devices.half) == (small.link, small.half)
    assert large.fp8 == 0 < small.fp8 and large.link > small.link
    assert not parse_devices("V100-32G,A100-80G")[1].bf16


@pytest.mark.parametrize("unknown", ["4xRTX9090", "", "2x{tflops: 1, memory_gib: 24}"])
def test_a_device_of_a_mix_that_is_not_known_is_answered_as_alone(unknown: str) -> None:
    with pytest.raises(ConfigError) as alone:
        parse_devices(unknown)
    for text in (f"4xRTX4090,{unknown}", f"{unknown},4xRTX4090"):
        with pytest.raises(ConfigError) as among:
            parse_devices(text)
        assert str(among.value) == str(alone.value)


@pytest.mark.parametrize("keys", [{}, {"schedule": "dualpipev"}, {"use_grad_ckpt": "auto"}])
def test_one_kind_written_in_two_parts_is_planned_to_the_digit_as_ever(keys: dict[str, Any], tmp_path: Path) -> None:
    one, parts = (Plan.make(basis(tmp_path, devices, 4, **keys)) for devices in ("4xA100-40G", "1xA100-40G,3xA100-40G"))
    assert one.basis.device == parts.basis.device and not parts.basis.device.each
    assert (one.parts, one.seconds, one.stages, one.times) == (parts.parts, parts.seconds, parts.stages, parts.times)
    assert plan_summary(one) == plan_summary(parts)
    assert one.times == layer_times(one.basis), "and these are the times of the layers without any stage"


def test_each_stage_takes_its_own_cards_time_and_memory(tmp_path: Path) -> None:
    devices = "1xRTX4090,1xA100-80G"
    fast, slow, pair = (Plan(basis(tmp_path, name), [4, 4]) for name in ("A100-80G", "RTX4090", devices))
    assert fast.times[:4] != slow.times[:4]
    assert pair.times == [*slow.times[:4], *fast.times[4:]]
    assert [stage.device.name for stage in pair.stages] == ["RTX4090-24G", "A100-80G"]
    assert pair.fits is (pair.stages[0].memory.peak <= (slow.basis.device.memory or 0))


def test_parts_have_the_fastest_slowest_stage_of_all_and_turn_with_the_cards(tmp_path: Path) -> None:
    for devices in (PAIR, "1xRTX3090,1xRTX4090", "1xRTX4090,2xRTX3090"):
        stages = parse_devices(devices)[0]
        known = basis(tmp_path, devices, stages, fp16={"enabled": True})
        known = replace(known, device=replace(known.device, each=tuple(room(each) for each in known.device.each)))
        slowest = {}
        for cuts in combinations(range(1, 8), stages - 1):
            parts = [end - begin for begin, end in zip([0, *cuts], [*cuts, 8], strict=True)]
            slowest[tuple(parts)] = max(stage.seconds for stage in Plan(known, parts).stages)
        best = best_parts(known)
        assert slowest[tuple(best)] == min(slowest.values())
        fast = [index for index, device in enumerate(known.device.each) if device.name.startswith("RTX4090")]
        assert best[fast[0]] > max(parts for stage, parts in enumerate(best) if stage not in fast)


def room(device: Any) -> Any:
    """The same device with memory for anything."""
    return replace(device, memory=10**15)


def test_memory_is_checked_by_stage(tmp_path: Path) -> None:
    """What only a card of 80 GB holds goes there; a card of 24 GB gets what it has room for."""
    keys: dict[str, Any] = {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
    small, pair = (basis(tmp_path, devices, blocks=10, **keys) for devices in ("RTX4090", "1xA100-80G,1xRTX4090"))
    parts = best_parts(pair)
    plan = Plan(pair, parts)
    assert plan.fits and not Plan(small, parts).fits
    assert plan.stages[0].memory.peak > (small.device.memory or 0) >= plan.stages[1].memory.peak
    assert not Plan(pair, parts[::-1]).fits, "the other way round the small card has too much"
    memory = MemoryModel(pair)
    assert memory.fits(0, ((0, parts[0]),)) and not memory.fits(1, ((0, parts[0]),))
    full = Plan(pair, parts[::-1])
    assert full.fullest is full.stages[1]
    assert plan_summary(full)[-1].startswith("memory: does not fit") and "on stage 1" in plan_summary(full)[-1]


def test_blocks_recompute_only_where_a_card_has_no_room(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"bf16": {"enabled": True}, "fp16": {"enabled": False}, "use_grad_ckpt": "auto"}
    known = with_parts(basis(tmp_path, PAIR, **keys), [4, 4])
    first, second = map(room, known.device.each)
    least = Plan(replace(known, recompute=frozenset({1, 2, 3})), [4, 4]).stages[0].memory
    first = replace(first, memory=least.peak)
    plan = Plan.make(replace(known, device=mixed([first, second])))
    assert plan.fits and plan.basis.recomputed and not plan.basis.recomputed & set(plan.stages[1].layers)


def test_a_message_takes_the_slower_ends_time(tmp_path: Path) -> None:
    known = basis(tmp_path, "2xA100-80G,2xRTX4090", 4)
    nvlink, pcie = (Fabric.of(kind).inside.seconds(1e6) for kind in known.device.kinds)
    assert known.transfers(1e6) == [nvlink, pcie, pcie]
    named = Fabric.named("nvlink,ib400", parse_devices("A100-80G")[1])
    assert replace(known, named=named).transfers(1e6) == 3 * [named.inside.seconds(1e6)]


def test_replicas_wait_for_the_slowest_card(tmp_path: Path) -> None:
    """[data, pipe]: each replica has a kind of its own, so that each stage has both."""
    grid = {"process_topology": {"axes": ["data", "pipe"], "dims": [2, 2]}}
    slow, mix = (
        Plan(basis(tmp_path, devices, model_topo=grid), [4, 4]) for devices in ("4xRTX3090", "2xRTX4090,2xRTX3090")
    )
    assert [device.name for device in mix.basis.of_stages] == 2 * ["1xRTX4090-24G,1xRTX3090-24G"]
    assert mix.times == slow.times and mix.seconds == pytest.approx(slow.seconds, rel=1e-6)


def test_utilization_is_of_all_cards_together(tmp_path: Path) -> None:
    (_, fast), (_, slow) = map(parse_devices, ("RTX4090", "RTX3090"))
    one, pair = (Plan(basis(tmp_path, devices), [4, 4]) for devices in ("RTX4090", PAIR))
    assert one.mfu and pair.mfu
    assert pair.mfu * pair.seconds * (fast.half + slow.half) == pytest.approx(one.mfu * one.seconds * 2 * fast.half)


def test_a_search_finds_what_no_stage_is_too_small_for(tmp_path: Path) -> None:
    known = basis(tmp_path, "1xA100-80G,1xRTX4090", blocks=10)
    found = search(known, 2)
    assert found and all(plan.fits for plan in found)
    assert found[0].seconds <= Plan.make(known).seconds
    assert more_stages(known) is None


def test_a_run_says_what_other_parts_than_autos_lose(tmp_path: Path) -> None:
    known = basis(tmp_path, PAIR)
    given = with_parts(known, [4, 4])
    chosen = choose(known.config, known.spec, known.device)
    auto_parts = chosen.topology.parts
    assert auto_parts == best_parts(known) != [4, 4]

    def lines(config: TrainConfig, division: Division) -> list[str]:
        return loss_of_parts(config, known.spec, known.device, None, division)

    assert lines(known.config, chosen) == []
    (line,) = lines(given.config, choose(given.config, known.spec, known.device))
    even, best = Plan(given, [4, 4]), Plan(known, auto_parts)
    assert line.startswith(
        f"parts: [4, 4] on 1xRTX4090-24G,1xRTX3090-24G: a step takes {even.seconds / best.seconds - 1:.0%}"
    )
    assert f"with {auto_parts}, those of parts: auto" in line


@pytest.mark.parametrize("parts", [None, [4, 4]])
def test_a_run_asks_every_process_for_its_card(
    parts: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = basis(tmp_path, PAIR, train_micro_batch_size_per_gpu=1)
    cards = list(known.device.each)
    gathered = "options.planner.planning.gather"
    monkeypatch.setattr(gathered, lambda value: cards if isinstance(value, Device) else [value])
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    job: Any = SimpleNamespace(config=with_parts(known, parts or []).config, progress=SimpleNamespace(known=None))
    job.division = split_as_configured(job.config, known.spec, in_stages=True)
    lines: list[str] = []
    task: Any = SimpleNamespace(spec=known.spec, in_stages=True, known_loader=None)
    for choice in Planning(task).on_divide(job):
        job.division = choice.division or job.division
        lines += choice.report
    told = [line for line in lines if line.startswith("parts: [")]
    assert len(told) == (1 if parts else 0)
    assert job.division.topology.parts == (parts or best_parts(known))


def test_a_calibration_of_one_card_is_passed_over(tmp_path: Path) -> None:
    known = basis(tmp_path, PAIR)
    kinds = {str(kind): (2.0, 2.0) for kind in (0, 1, 7)}
    Calibration.of(known.config, known.spec, kinds, 1.0).write(Path(known.config.save_path))
    of_one, _ = Basis.of_run(known.config, known.spec, known.workload, known.device.each[0])
    of_both, lines = Basis.of_run(known.config, known.spec, known.workload, known.device)
    assert of_one.calibration and not of_both.calibration
    assert lines == ["calibration.json: ignored: measured on CPU, and here are 1xRTX4090-24G,1xRTX3090-24G"]
    assert of_one.conditions["device"] != of_both.conditions["device"]


def test_this_machines_cards_are_all_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = [SimpleNamespace(name=name, total_memory=24 * 2**30) for name in names]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    assert devices_here().name == "1xRTX4090-24G,2xRTX3090-24G"
    assert devices_here(2).name == "1xRTX4090-24G,1xRTX3090-24G"
    assert devices_here(8).name == "RTX3090-24G", "processes of several machines: this process's"
    machine = Machine.find({"a": [0, 1], "b": [2, 1]}, None)
    assert (machine.kind.name, machine.counts) == ("1xRTX4090-24G,3xRTX3090-24G", (4,))
    assert mixed(2 * [devices_here(1)]) == devices_here(1)


def test_the_plan_shows_the_card_of_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = basis(tmp_path, PAIR).config
    Path(config.save_path).mkdir()
    plan_run(config, arguments(devices=PAIR))
    printed = capsys.readouterr().out
    assert "6 layers" not in printed and "8 layers; 1xRTX4090-24G,1xRTX3090-24G" in printed
    assert "│     0 │ RTX4090-24G │" in printed and "│     1 │ RTX3090-24G │" in printed
    assert "a roofline of RTX4090-24G" in printed and "a roofline of RTX3090-24G" in printed
    with pytest.raises(ConfigError, match=r"^--calibrate: measures one kind of device"):
        plan_run(config, arguments(devices=PAIR, calibrate=True))


def test_numbers_that_one_of_the_cards_lacks_are_refused(tmp_path: Path) -> None:
    config = basis(tmp_path, PAIR, bf16={"enabled": True}, fp16={"enabled": False}, fp8={"enabled": True}).config
    with pytest.raises(ConfigError, match=r"^fp8\.enabled: RTX3090-24G is older"):
        plan_run(config, arguments(devices=PAIR))


def test_auto_chooses_for_the_cards_that_are_named(tmp_path: Path) -> None:
    model, grid = outline(tmp_path / "model", num_hidden_layers=6), "model_topo.process_topology.dims"
    written = load_config(auto(model, tmp_path / "run", UNTRAINED, f"{grid}=[2,1]", "schedule=1f1b", devices=PAIR))
    parts = written.model_topo.parts
    assert parts and len(parts) == 2 and parts[0] > parts[1]
    with pytest.raises(ConfigError, match=rf"^{grid}: 4 processes on 1xRTX4090-24G,1xRTX3090-24G; expected one on"):
        auto(model, tmp_path / "other", UNTRAINED, f"{grid}=[4,1]", devices=PAIR)
