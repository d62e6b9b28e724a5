"""The planner: published needs, division, memory, advice and search."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from common.quantities import duration
from data.sample_set import InMemory, Sample
from models.spec import ModelSpec
from options.planner.costs import layer_times
from options.planner.inputs import Basis, Workload
from options.planner.layer_costs import LayerCase, saved_by
from options.planner.measurements import FILE, Calibration
from options.planner.memory import CPU_FP32, CPU_KERNELS, CPU_WITHOUT_KERNELS, MemoryModel, StateBytes
from options.planner.plan import Plan, best_parts
from options.planner.planning import Planning, choose, divide
from options.planner.search import advise, cheaper, search
from options.planner.tables import plan_summary, search_table
from options.planner.timing import calibrate
from tests.conftest import TINY
from tests.options.planner.helpers import basis_of, config_of, llama, spec_of
from training.batches import build_loader
from training.config.keys import TrainConfig
from training.metrics.devices import GIB, parse_devices, this_device

ON_CPU = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}


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
        (ON_CPU, 2, 2, 0, 18),
        (ON_CPU | {"offload_gradients": True}, 2, 0, 0, 18),
        (ON_CPU | {"offload_gradients": True, "bf16": {"enabled": True}, "fp16": {}}, 2, 0, 0, 18),
        (ON_CPU | {"offload_gradients": True, "replicas": 2}, 2, 0, 0, 18 / 2 + 2 / 2),  # sums of the other's half
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


@pytest.mark.parametrize(
    ("parts", "recompute", "in_stages", "expected"),
    [
        (None, True, True, True),
        ([16, 18], True, True, False),
        ([16, 18], "auto", True, True),
        (None, "auto", False, False),
    ],
)
def test_the_planner_divides_what_the_config_leaves_open(
    parts: list[int] | None, recompute: bool | str, in_stages: bool, expected: bool, tmp_path: Path
) -> None:
    topology = {"process_topology": {"dims": [2 if in_stages else 1, 1]}, "parts": parts}
    config = config_of(tmp_path, 1, use_grad_ckpt=recompute, model_topo=topology)
    job: Any = SimpleNamespace(config=config, progress=SimpleNamespace(known=None))
    task: Any = SimpleNamespace(spec=llama(tmp_path), in_stages=in_stages, known_loader=None)
    with (
        patch("options.planner.planning.gather", lambda value: [value]),
        patch("torch.distributed.get_rank", lambda: 0),
    ):
        choices = list(Planning(task).on_divide(job))
    assert any(choice.division for choice in choices) == expected


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
    told = plan_summary(replace(plan, basis=replace(plan.basis, workload=replace(plan.basis.workload, steps=1000))))
    assert f"the whole run: 1,000 steps, {duration(1000 * plan.seconds)}" in told
    assert not any("the whole run" in line for line in plan_summary(plan))


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
    assert [each.best.fits for each in advice] == [False] * (len(advice) - 1) + [True]
    peaks = [each.best.peak for each in advice]
    assert peaks == sorted(peaks, reverse=True)


def test_activations_are_advised_to_leave_a_gpu_alone(tmp_path: Path) -> None:
    """On a CPU they lie in main memory already."""
    basis = basis_of(tiny(tmp_path), config_of(tmp_path, 1, max_seq_len=128))
    for device in (basis.device, this_device()):
        changes = cheaper(replace(basis, device=replace(device, memory=1000)))
        assert ("offload_activations: true" in changes) == device.reserves


def test_what_saves_nothing_is_no_advice(tmp_path: Path) -> None:
    basis = basis_of(tiny(tmp_path), config_of(tmp_path, 1, max_seq_len=128))  # the optimizer's step takes most
    advice = advise(replace(basis, device=replace(basis.device, memory=1000)))
    now = Plan.make(basis).peak
    assert advice and all(each.alone.peak < now or each.best.peak < now for each in advice)


def test_sums_in_main_memory_are_advised_for_what_fits_no_other_way(tmp_path: Path) -> None:
    keys: dict[str, Any] = ON_CPU | {"bf16": {"enabled": True}, "fp16": {}, "use_grad_ckpt": True}
    config = config_of(tmp_path, 8, offload_activations=True, **keys)
    basis = basis_of(llama(tmp_path, "llama-30b"), config, "RTX4090")
    advice = advise(basis)
    assert [each.change for each in advice] == ["offload_gradients: true"]
    assert advice[0].alone.fits and not Plan.make(basis).fits
    alone = advice[0].alone
    assert isinstance(alone, Plan) and 0.6 * alone.peak < max(stage.memory.weights for stage in alone.stages)


@pytest.mark.slow
def test_other_ways_come_before_shorter_rows_and_more_devices(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"bf16": {"enabled": True}, "fp16": {}, "use_grad_ckpt": True}
    advice = advise(basis_of(llama(tmp_path, "llama-65b"), config_of(tmp_path, 8, **keys), "RTX4090"))
    changes = [each.change for each in advice]
    ways = [
        "schedule: weight_streaming",
        "lora: true, which trains adapters",
        "lora: {base: nf4}, which trains adapters",
    ]
    assert [change for change in changes if change in ways] == ways[-2:] or changes[-4:-1] == ways
    assert changes[-1].startswith("model_topo.process_topology.dims: ") and advice[-1].best.fits
    assert not any(change.startswith(("max_seq_len", "optimizer.type")) for change in changes)
    nf4 = next(each for each in advice if each.change == ways[-1])
    assert nf4.alone.fits and nf4.alone.peak < advice[changes.index(ways[-2])].alone.peak


def test_a_search_proposes_what_fits(tmp_path: Path) -> None:
    basis = basis_of(llama(tmp_path), config_of(tmp_path, 1, train_batch_size=64), "A100-40G")
    best = search(basis, 8)
    assert best and all(plan.fits and plan.basis.config.model_topo.processes == 8 for plan in best)
    assert [plan.seconds for plan in best] == sorted(plan.seconds for plan in best)
    assert best[0].seconds <= Plan.make(basis_of(llama(tmp_path), config_of(tmp_path, 8, train_batch_size=64))).seconds


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


def test_memory_of_a_rank_grows_with_its_layers(tmp_path: Path) -> None:
    """The search for the best division counts on it."""
    config = config_of(tmp_path, 4)
    memory = MemoryModel(basis_of(llama(tmp_path), config))
    peaks = [memory.rank(1, ((4, end),)).peak for end in range(5, 35)]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("bf16", [True, False])
def test_on_a_cpu_kernels_count_where_it_has_any(bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, found = tiny(tmp_path), []
    config = config_of(tmp_path, 1, fp16={"enabled": False}, bf16={"enabled": bf16})
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", partial(bool, supported))
        basis = Basis(config, spec, Workload.assumed(config), this_device())
        found.append(MemoryModel(basis).rank(0, ((0, spec.n_layers),)).beyond)
    assert found == ([CPU_KERNELS, CPU_WITHOUT_KERNELS] if bf16 else [CPU_FP32, CPU_FP32])
