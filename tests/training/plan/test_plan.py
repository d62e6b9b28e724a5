"""The planner: published needs, what it prints and what it refuses."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console

import train_ds_zero
from data.sample_set import InMemory, Sample
from models.costs import LayerCase, saved_by
from models.errors import CheckpointError
from models.spec import ModelSpec
from tests.conftest import FAQ, TINY
from tests.launching import write_config
from tests.training.plan.helpers import basis_of, config_of, llama, spec_of
from training.config.keys import TrainConfig
from training.data_setup import build_loader
from training.errors import ConfigError
from training.metrics.devices import GIB, USABLE, parse_devices, this_device
from training.plan.auto import choose, divide
from training.plan.command import draw, plan_run, search_table
from training.plan.costs import layer_times
from training.plan.inputs import FILE, Basis, Calibration, Workload
from training.plan.memory import MemoryModel, StateBytes
from training.plan.plan import Plan, best_parts
from training.plan.search import advise, search
from training.plan.timing import calibrate


@pytest.mark.parametrize(
    ("name", "devices", "keys", "enough"),
    [
        ("llama-13b", 14, {}, True),
        ("llama-30b", 31, {}, True),
        ("llama-65b", 80, {}, True),
        ("llama-13b", 8, {"optimizer": {"type": "Lion"}, "max_seq_len": 128}, True),
        ("llama-13b", 6, {}, False),  # weights, gradients and states alone are 208 GB
    ],
)
def test_published_needs_are_enough(
    name: str, devices: int, keys: dict[str, Any], enough: bool, tmp_path: Path
) -> None:
    plan = Plan.make(basis_of(llama(tmp_path, name), config_of(tmp_path, devices, **keys)))
    assert plan.fits == enough, plan.peak / GIB


def test_early_stages_keep_more_activations_and_recomputation_less(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    peaks = {}
    for recompute in (False, True):
        config = config_of(tmp_path, 4, use_grad_ckpt=recompute)
        memory = MemoryModel(basis_of(spec, config))
        peaks[recompute] = [memory.rank(rank, ((1 + 8 * rank, 9 + 8 * rank),)).activations for rank in range(4)]
    assert peaks[False] == sorted(peaks[False], reverse=True)
    assert all(less * 3 < more for less, more in zip(peaks[True], peaks[False], strict=True))


def test_of_offloaded_activations_those_of_two_blocks_are_back_at_a_time(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    layers = ((1, 9),)
    peaks = {}
    for offload in (False, True):
        config = config_of(tmp_path, 4, use_grad_ckpt=False, offload_activations=offload)
        model = MemoryModel(basis_of(spec, config))
        peaks[offload] = model.rank(1, layers).activations
    inside = saved_by(spec, LayerCase(1, 1, 2048, torch.float16)).inside
    under_way = 3  # micro-batches on the second of four stages
    assert peaks[False] - peaks[True] == 8 * under_way * inside - 2 * inside


@pytest.mark.parametrize(
    ("keys", "weight", "gradient", "optimizer", "host"),
    [
        ({"fp16": {"enabled": True}}, 2, 2, 12, 0),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, 2, 4, 12, 0),
        ({"fp16": {"enabled": False}}, 4, 4, 12, 0),
        ({"fp16": {"enabled": False}, "zero_optimization": {"stage": 0}}, 4, 4, 8, 0),
        ({"optimizer": {"type": "Lion"}}, 2, 2, 8, 0),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, 2, 2, 0, 18),
        ({"replicas": 4}, 2, 2, 3, 0),
    ],
)
def test_bytes_of_a_parameter(
    keys: dict[str, Any], weight: float, gradient: float, optimizer: float, host: float, tmp_path: Path
) -> None:
    keys = dict(keys)
    states = StateBytes.of(config_of(tmp_path, 2, keys.pop("replicas", 1), **keys))
    assert (states.weight, states.gradient, states.optimizer, states.host) == (weight, gradient, optimizer, host)


def test_a_tied_weight_counts_once_where_one_rank_holds_both_ends(tmp_path: Path) -> None:
    tied, apart = (llama(tmp_path, tie_word_embeddings=value) for value in (True, False))
    layers = ((0, tied.n_layers),)
    config = config_of(tmp_path, 1)
    weights = [MemoryModel(basis_of(spec, config)).rank(0, layers).weights for spec in (tied, apart)]
    assert weights[1] - weights[0] == 2 * 32000 * 4096


def test_the_division_is_no_slower_than_the_published_one(tmp_path: Path) -> None:
    """parts [5, 4, 4, 4, 4, 4, 4, 5] for 8 devices."""
    basis = basis_of(llama(tmp_path), config_of(tmp_path, 8), "A100-80G")
    chosen = Plan(basis, best_parts(basis))
    published = Plan(basis, [5, 4, 4, 4, 4, 4, 4, 5])
    assert max(stage.seconds for stage in chosen.stages) <= max(stage.seconds for stage in published.stages)
    assert chosen.parts == best_parts(basis)


def test_a_large_vocabulary_takes_blocks_from_the_last_stage(tmp_path: Path) -> None:
    basis = basis_of(llama(tmp_path, vocab_size=256_000), config_of(tmp_path, 8), "H200")
    parts = best_parts(basis)
    assert parts[-1] < min(parts[1:-1])
    instructions = replace(basis, workload=replace(basis.workload, supervised=0.05))  # the head has little to do
    assert best_parts(instructions)[-1] > parts[-1]


def test_the_limit_of_memory_moves_layers(tmp_path: Path) -> None:
    """Early stages keep more micro-batches, so where memory is short they get fewer layers."""
    keys: dict[str, Any] = {"use_grad_ckpt": False, "train_micro_batch_size_per_gpu": 4}
    basis = basis_of(llama(tmp_path), config_of(tmp_path, 4, **keys), "H200")
    free = Plan(basis, best_parts(basis))
    short = replace(basis, device=replace(basis.device, memory=int(free.peak * 0.93)))
    moved = Plan(short, best_parts(short))
    assert moved.fits
    assert moved.parts[0] < free.parts[0]


def test_auto_recomputes_as_few_blocks_as_fit_and_says_so(tmp_path: Path) -> None:
    """Early stages keep more micro-batches, so they recompute more; with one block less they would not fit."""
    spec = llama(tmp_path)
    parts = [9, 8, 8, 9]
    topo = {"process_topology": {"dims": [4, 1]}, "parts": parts}
    config = config_of(tmp_path, 4, use_grad_ckpt="auto", train_micro_batch_size_per_gpu=4, model_topo=topo)
    plain = Plan(basis_of(spec, config.model_copy(update={"use_grad_ckpt": False}), "H200"), parts)
    device = replace(plain.basis.device, memory=int(plain.peak * 0.6))

    division = choose(config, spec, device)
    chosen = [division.recompute.intersection(stage.layers) for stage in plain.stages]
    counts = [len(blocks) for blocks in chosen]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    assert division.report == (f"gradient checkpointing: auto, {str(counts)[1:-1]} blocks of the stages recompute",)
    assert division.topology.parts == parts

    def fits(stage: int, blocks: frozenset[int]) -> bool:
        memory = MemoryModel(Basis(config, spec, Workload.assumed(config), device, recompute=blocks))
        return memory.fits(stage, plain.held[stage])

    for stage, blocks in enumerate(chosen):
        assert fits(stage, blocks)
        assert not blocks or not fits(stage, blocks - {max(blocks)})


def test_auto_with_room_for_everything_or_without_an_account_of_it(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    config = config_of(tmp_path, 4, use_grad_ckpt="auto")
    roomy = choose(config, spec, replace(parse_devices("H200")[1], memory=None))
    assert not roomy.recompute
    assert roomy.report[-1] == "gradient checkpointing: auto, no block recomputes"
    zero = divide(config_of(tmp_path, 1, 4, use_grad_ckpt="auto"), spec, in_stages=False)
    assert zero.recompute == set(range(1, spec.n_blocks + 1)) and zero.topology.parts == []
    assert "all blocks" in zero.report[0]


def test_where_nothing_fits_the_least_memory_is_taken(tmp_path: Path) -> None:
    basis = basis_of(llama(tmp_path, "llama-13b"), config_of(tmp_path, 4))
    least = Plan(basis, best_parts(basis))
    assert not least.fits
    assert least.peak <= 1.02 * Plan(basis, [11, 11, 10, 10]).peak


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_a_plan_adds_up(schedule: str, tmp_path: Path) -> None:
    spec = llama(tmp_path)
    config = config_of(tmp_path, 8, schedule=schedule, bf16={"enabled": True}, fp16={"enabled": False})
    plan = Plan.make(basis_of(spec, config, "A100-80G"))
    assert sum(plan.parts) == 34 and len(plan.parts) == config.chunks
    assert sum(stage.parameters for stage in plan.stages) == 6_738_415_616
    assert 0 < plan.bubble < 0.2
    assert plan.mfu is not None and 0.2 < plan.mfu < 0.6  # 0.78 of the peak, less traffic, bubble and recomputation
    assert plan.run_seconds is None
    known = Plan.make(replace(plan.basis, workload=replace(plan.basis.workload, steps=1000)))
    assert known.run_seconds == pytest.approx(1000 * plan.seconds)


def test_more_micro_batches_than_are_simulated_take_as_much_longer(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    seconds = [
        Plan.make(basis_of(spec, config_of(tmp_path, 4, train_batch_size=n), "H200")).seconds for n in (256, 512)
    ]
    assert seconds[1] / seconds[0] == pytest.approx(2, rel=0.02)


def test_advice_is_cheapest_first_and_ends_where_it_fits(tmp_path: Path) -> None:
    config = config_of(tmp_path, 8, use_grad_ckpt=False, train_micro_batch_size_per_gpu=4)
    advice = advise(basis_of(llama(tmp_path, "llama-13b"), config))
    changes = [each.change for each in advice]
    assert changes == [
        "train_micro_batch_size_per_gpu: 1",
        "use_grad_ckpt: true",
        "zero_optimization.offload_optimizer: {device: cpu}",
    ]
    assert [each.together.fits for each in advice] == [False] * (len(advice) - 1) + [True]
    peaks = [each.together.peak for each in advice]
    assert peaks == sorted(peaks, reverse=True)


def test_activations_are_advised_to_leave_a_gpu_alone(tmp_path: Path) -> None:
    """On a CPU they lie in main memory already."""
    basis = basis_of(tiny(tmp_path), config_of(tmp_path, 1, max_seq_len=128))
    for device in (basis.device, this_device()):
        advice = advise(replace(basis, device=replace(device, memory=1000)))
        assert ("offload_activations: true" in [each.change for each in advice]) == device.reserves


def test_a_search_proposes_what_fits(tmp_path: Path) -> None:
    basis = basis_of(llama(tmp_path), config_of(tmp_path, 1, train_batch_size=64), "A100-40G")
    best = search(basis, 8)
    assert best and all(plan.fits and plan.basis.config.model_topo.processes == 8 for plan in best)
    assert [plan.seconds for plan in best] == sorted(plan.seconds for plan in best)
    assert best[0].seconds <= Plan.make(basis_of(llama(tmp_path), config_of(tmp_path, 8, train_batch_size=64))).seconds


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("8xA100", "A100-40G, A100-80G, such as 8xA100-40G"),
        ("8xA100-41G", "A100-40G, A100-80G"),
        ("4xv100", "V100-16G, V100-32G"),
        ("A100-40G-8", "A100-40G"),
        ("RTX409", "RTX4090-24G"),
        ("0xH100", "H100-80G"),
        ("8", "B200-180G, GH200-96G"),
        ("8xZ9000", "B200-180G, GH200-96G"),
        ("", "B200-180G, GH200-96G"),
    ],
)
def test_a_device_that_is_not_known_is_answered_with_those_like_it(text: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_devices(text)
    assert str(caught.value).startswith(f"--devices: {text!r}: expected a number and one of {near}")


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("4x4090", 4, "RTX4090-24G"),
        ("3090", 1, "RTX3090-24G"),
        ("h100", 1, "H100-80G"),
        ("2 x v100-32", 2, "V100-32G"),
        ("Tesla V100-SXM2-32GB", 1, "V100-32G"),
        ("8xA100-SXM4-80GB", 8, "A100-80G"),
        ("RTX 4090", 1, "RTX4090-24G"),
        ("8XA6000", 8, "RTXA6000-48G"),
        ("H200NVL", 1, "H200NVL-141G"),
    ],
)
def test_devices_go_by_the_names_that_people_use(text: str, count: int, name: str) -> None:
    found, device = parse_devices(text)
    assert (found, device.name) == (count, name)
    if name == "A100-80G":
        assert device.memory == int(80 * GIB * USABLE) and device.half == 312e12


@pytest.mark.parametrize(
    ("keys", "devices", "line"),
    [
        ({"bf16": True, "fp16": False}, "2xV100-32G", "bf16.enabled: V100-32G does not compute in bf16; expected fp16"),
        ({"bf16": True, "fp16": False}, "2xT4", "bf16.enabled: T4-16G does not compute in bf16; expected fp16"),
        ({"tf32": True, "fp16": False}, "2xV100-16G", "tf32: V100-16G does not have it; expected false"),
        ({"fp8": True, "bf16": True, "fp16": False}, "2xA100-80G", "fp8.enabled: A100-80G is older than Ada and Hopp"),
        (
            {"zero_optimization": {"stage": 0}},
            "2xA100-80G",
            "zero_optimization.stage: 0 does not scale the loss, which",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "large"}},
            "2xA100-80G",
            "zero_optimization.reduce_bucket_size: In",
        ),
    ],
)
def test_a_device_that_the_run_would_refuse_is_no_plan(
    keys: dict[str, Any], devices: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path)
    with pytest.raises(ConfigError) as caught:
        plan_run(config_of(tmp_path, 2, **keys), arguments(devices=devices))
    assert str(caught.value).startswith(line)
    assert "fits" not in capsys.readouterr().out


def test_a_search_marks_what_leaves_less_room_than_a_plan_may_err(tmp_path: Path) -> None:
    plan = Plan.make(basis_of(llama(tmp_path), config_of(tmp_path, 8)))
    rows = {}
    for share in (0.94, 0.96, 1.0):
        device = replace(plan.basis.device, memory=int(plan.peak / share))
        made = Plan(replace(plan.basis, device=device), plan.parts)
        log = Console(width=200)
        with log.capture() as printed:
            log.print(search_table([made]))
        rows[share] = " ".join(printed.get().split())
    assert "*" not in rows[0.94] and "less than 5% of the memory is left" not in rows[0.94]
    for share in (0.96, 1.0):
        assert f"{plan.peak / 1e9:.2f}*" in rows[share] and "less than 5% of the memory is left" in rows[share]


def test_a_search_keeps_what_is_fixed(tmp_path: Path) -> None:
    topo = {"process_topology": {"dims": [4, 2]}, "parts": [10, 8, 8, 8]}
    config = config_of(tmp_path, 4, 2, model_topo=topo, train_micro_batch_size_per_gpu=2)
    basis = basis_of(llama(tmp_path), config, "H200")
    best = search(basis, 8, fixed=("model_topo", "train_micro_batch_size_per_gpu"))
    assert {(plan.basis.config.use_grad_ckpt, plan.basis.config.schedule) for plan in best} == {
        (True, "1f1b"),
        (False, "1f1b"),
    }  # with dualpipev there would be eight parts
    assert all(plan.parts == [10, 8, 8, 8] for plan in best)
    assert all(plan.basis.config.train_micro_batch_size_per_gpu == 2 for plan in best)


def test_a_search_feeds_each_candidate_what_its_steps_would_have(tmp_path: Path) -> None:
    basis = basis_of(llama(tmp_path), config_of(tmp_path, 2), "H200")

    def feed(config: TrainConfig) -> Workload:
        rows = config.train_micro_batch_size_per_gpu
        return replace(Workload.assumed(config), length=64.0 if rows == 2 else 2048.0)  # as if two rows had no padding

    best = search(basis, 2, feed, fixed=("schedule", "use_grad_ckpt"))
    assert best[0].basis.config.train_micro_batch_size_per_gpu == 2 and best[0].basis.workload.length == 64.0


def tiny(folder: Path, **changes: Any) -> ModelSpec:
    return spec_of(folder, {**TINY, "model_type": "llama", **changes})


def arguments(**given: Any) -> Namespace:
    return Namespace(**{"devices": None, "links": None, "per_host": None, "search": False, "calibrate": False} | given)


def test_measured_times_replace_estimates(tmp_path: Path) -> None:
    spec = tiny(tmp_path, num_hidden_layers=6)
    config = config_of(tmp_path, 2, fp16={"enabled": False}, max_seq_len=64, train_batch_size=4)
    workload = Workload.assumed(config)
    threads = torch.get_num_threads()
    found = calibrate(config, spec, workload)
    assert torch.get_num_threads() == threads
    slower = found.model_copy(update={"update": 2 * found.update, "layers": found.layers | {"1": (1e-9, 1e9)}})
    least = found.least(slower)
    assert (least.update, least.layers["1"]) == (found.update, (1e-9, found.layers["1"][1]))
    assert set(found.layers) == {"0", "1", "7"}
    assert found.update > 0 and all(factor > 0 for pair in found.layers.values() for factor in pair)
    found.layers["7"] = (1e6, 1e6)  # a very slow head
    found.write(tmp_path / "run")
    lines: list[str] = []
    read = Calibration.read(tmp_path / "run", config, spec, lines.append)
    assert read is not None
    basis = Basis(config, spec, workload, this_device(), read)
    assert best_parts(basis) == [7, 1]
    longer = replace(basis, workload=replace(workload, length=128.0))
    ratio = layer_times(longer)[1].forward.total / layer_times(basis)[1].forward.total
    assert 1.5 < ratio < 2.5
    recomputed = replace(basis, recompute=frozenset())
    assert layer_times(recomputed)[1].backward.total < layer_times(basis)[1].backward.total
    for other in (config.model_copy(update={"bf16": config.bf16.model_copy(update={"enabled": True})}), config):
        changed = spec if other is not config else tiny(tmp_path, num_hidden_layers=7)
        assert Calibration.read(tmp_path / "run", other, changed, lines.append) is None
    (tmp_path / "run" / FILE).write_text("{", encoding="utf-8")
    assert Calibration.read(tmp_path / "run", config, spec, lines.append) is None
    assert lines == [f"{tmp_path / 'run' / FILE}: ignored: damaged"]


def test_plan_needs_neither_weights_nor_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(tmp_path, "llama-13b")
    plan_run(config_of(tmp_path, 14), arguments(devices="14xV100-32G"))
    printed = capsys.readouterr().out
    assert "memory: fits" in printed and "data: assumed" in printed and "bubble" in printed and "MFU" in printed
    assert "attention" in printed and "waiting" in printed and "replicas" not in printed  # of which there is one
    assert (tmp_path / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit) as leaving:
        plan_run(config_of(tmp_path, 4), arguments(devices="4xV100-32G"))
    assert leaving.value.code == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed and "offload_optimizer: {device: cpu}" in printed
    with pytest.raises(ConfigError, match="--devices: 8 of them"):
        plan_run(config_of(tmp_path, 4), arguments(devices="8xV100-32G"))


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_micro_batches_that_the_schedule_makes_smaller_are_planned_so(rows: int, tmp_path: Path) -> None:
    """A batch of 16 rows in eight micro-batches, as two chunks on each of four stages need them, whatever is asked."""
    keys: dict[str, Any] = {"schedule": "dualpipev", "packing": False, "max_seq_len": 128, "train_batch_size": 16}
    config = config_of(tmp_path, 4, train_micro_batch_size_per_gpu=rows, **keys)
    samples: list[Sample] = [{"input_ids": [3] * 128, "labels": [3] * 128}] * 64
    cut = min(rows, 2)
    for work in (Workload.assumed(config), Workload.measured(build_loader(InMemory(samples), config), config)):
        assert (work.rows, work.micro_batches, work.length, work.tokens) == (cut, 16 // cut, 128, 16 * 128)
        assert work.supervised == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("devices", "keys", "texts"),
    [
        ("8xV100-32G", {}, ["llama, 8 stages of", "memory fits: at most ", "s a step, ", " tokens/s, "]),
        ("4xV100-32G", {}, ["memory does not fit: at most ", " GB of tensors of 32.99 GB usable"]),
        (None, {"fp16": {"enabled": False}}, ["GB of tensors a process, which holds Python", "no known limit"]),
    ],
)
def test_the_picture_says_what_the_lines_say(
    devices: str | None, keys: dict[str, Any], texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []

    def savefig(figure: Figure, path: Path, **_: Any) -> None:
        figure.draw_without_rendering()
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    config = config_of(tmp_path, int(devices[0]) if devices else 2, **keys)
    device = parse_devices(devices)[1] if devices else this_device()
    plan = Plan.make(Basis(config, llama(tmp_path), Workload.assumed(config), device))
    draw(plan, tmp_path / "plan.png")
    (figure,) = drawn
    title = figure.get_suptitle()
    assert all(text in title for text in texts) and ("tokens/s" in title) == plan.knows_seconds
    memory, time = figure.axes
    heights = [0.0] * len(plan.stages)
    for bar in memory.patches:
        assert isinstance(bar, Rectangle)
        heights[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
    assert heights == pytest.approx([stage.memory.peak / 1e9 for stage in plan.stages])
    assert memory.get_ylim()[1] > max(heights)
    for panel in (memory, time):
        legend = panel.get_legend()
        assert legend and legend.get_window_extent().x0 >= panel.get_window_extent().x1, "nothing is hidden"


def test_a_plan_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    llama(tmp_path)
    (tmp_path / "file").touch()
    config = config_of(tmp_path, 2, save_path=str(tmp_path / "file/run"))
    with pytest.raises(CheckpointError, match=r"file/run: cannot be written: Not a directory; nothing was changed$"):
        plan_run(config, arguments(devices="2xA100-80G"))


def test_plan_measures_the_records(tmp_path: Path, make_checkpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint("llama")
    keys: dict[str, Any] = {
        "data_path": str(FAQ),
        "save_path": str(tmp_path / "run"),
        "max_seq_len": 256,
        "train_batch_size": 16,
    }
    config = config_of(folder, 2, fp16={"enabled": False}, **keys)
    plan_run(config, arguments(calibrate=True))
    printed = capsys.readouterr().out
    assert "batches of data_path" in printed and "measured on CPU" in printed and "the whole run: 7 steps" in printed


def test_zero_has_no_pipeline_to_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path)
    path = write_config(tmp_path / "config.yml", model_path=str(tmp_path), data_path="x")
    monkeypatch.setattr(sys, "argv", ["train_ds_zero.py", "--config", str(path), "--plan"])
    with pytest.raises(SystemExit) as left:
        train_ds_zero.main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: --plan: plans pipelines; expected train_ds.py")


def test_memory_of_a_rank_grows_with_its_layers(tmp_path: Path) -> None:
    """The search for the best division counts on it."""
    config = config_of(tmp_path, 4)
    memory = MemoryModel(basis_of(llama(tmp_path), config))
    peaks = [memory.rank(1, ((4, end),)).peak for end in range(5, 35)]
    assert peaks == sorted(peaks)
