"""A kernel's time by arithmetic, by memory and by launches; and what a plan's time is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from options.planner.costs import HOST, TILE, Roofline, Spent, layer_times
from options.planner.layer_costs import product
from options.planner.plan import Plan
from options.planner.tables import times_table
from tests.options.planner.helpers import basis_of, config_of, llama
from training.metrics.devices import CPU, parse_devices

A100 = parse_devices("A100-80G")[1]
BF16 = torch.bfloat16


def test_a_large_product_gets_its_share_of_the_peak() -> None:
    roofline = Roofline(A100, BF16, 1, 1.0)
    large = product(128 * 108, 8192, 128 * 108, 2, 2)  # as many tiles as fill all cores
    rate = large.flops / (roofline.seconds(large) - A100.kernel)
    assert rate == pytest.approx(A100.products * 312e12)


def test_the_last_wave_of_tiles_takes_as_long_as_a_full_one() -> None:
    roofline = Roofline(A100, BF16, 1, 1.0)
    full, more = (roofline.seconds(product(tiles * TILE, 8192, 12 * TILE, 2, 2)) for tiles in (9, 10))  # of 108 cores
    assert more - A100.kernel == pytest.approx(2 * (full - A100.kernel))


def test_a_thin_product_waits_for_memory() -> None:
    thin = product(4096, 16, 4096, 2, 4)
    seconds = Roofline(A100, BF16, 1, 1.0).seconds(thin) - A100.kernel
    assert thin.bytes == 2 * 2 * 4096 * 16 + 4 * 4096 * 4096
    assert seconds == pytest.approx(thin.bytes / A100.bandwidth)


def test_short_documents_take_less_attention_and_at_a_lower_rate(tmp_path: Path) -> None:
    basis = basis_of(llama(tmp_path), config_of(tmp_path, 8, use_flash_attn=True), "A100-80G")
    of_documents = {
        attended: layer_times(replace(basis, workload=replace(basis.workload, attended=attended)))[1].forward.attention
        for attended in (256, 1024, 2048)
    }
    assert of_documents[256] < of_documents[1024] < of_documents[2048] < 2 * of_documents[1024]


@pytest.mark.parametrize("flash", [False, True])
def test_attention_through_a_window_grows_with_the_row_alone(flash: bool, tmp_path: Path) -> None:
    spec = llama(tmp_path, model_type="mistral", sliding_window=1024, max_position_embeddings=32768)
    whole, longer, short = (
        layer_times(replace(basis, workload=replace(basis.workload, attended=attended)))[1].forward.attention
        for length, attended in ((8192, 8192), (16384, 16384), (16384, 256))
        for basis in [basis_of(spec, config_of(tmp_path, 8, max_seq_len=length, use_flash_attn=flash), "A100-80G")]
    )
    assert longer == pytest.approx(2 * whole, rel=0.1)
    assert short < longer


def test_tiny_micro_batches_wait_for_the_host(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    waits = {}
    for length in (2, 2048):
        basis = basis_of(spec, config_of(tmp_path, 8, max_seq_len=length, compile=False), "H100")
        waits[length] = layer_times(basis)[1].forward.launches
    assert waits[2] > 0 == waits[2048]


def test_newer_and_larger_devices_are_faster(tmp_path: Path) -> None:
    spec, config = llama(tmp_path), config_of(tmp_path, 8)
    speeds = [
        Plan(basis_of(spec, config, device), [5, 4, 4, 4, 4, 4, 4, 5]).tokens_per_s
        for device in ("V100-32G", "A100-40G", "A100-80G", "H100PCIe", "H100", "H200")
    ]
    assert speeds == sorted(speeds)


def test_sums_in_fp32_move_more_than_sums_in_16_bits(tmp_path: Path) -> None:
    """A bf16 gradient and its fp32 sum, read and written: 10 bytes; fp16 sums are 16 bits wide: 6."""
    spec = llama(tmp_path)
    bf16 = config_of(tmp_path, 8, bf16={"enabled": True}, fp16={"enabled": False})
    half, single = (
        layer_times(basis_of(spec, config, "H100"))[1].backward.sums for config in (config_of(tmp_path, 8), bf16)
    )
    assert single == pytest.approx(10 / 6 * half)


def test_sums_of_replicas_hide_behind_the_last_backward_pass(tmp_path: Path) -> None:
    """By NVLink all but the handing round of the weights hides; by PCIe, with short rows, a part does not."""
    spec, blocks = llama(tmp_path), 1
    late = {"zero_optimization": {"stage": 1, "reduce_scatter": True}}
    times = {
        (device, length, early): layer_times(
            basis_of(spec, config_of(tmp_path, 4, 2, max_seq_len=length, **({} if early else late)), device)
        )[blocks]
        for device, length in (("A100-80G", 2048), ("RTX3090", 32))
        for early in (True, False)
    }
    weights = sum(shape.numel() for shape in spec.shapes(blocks).values())
    fast, slow = parse_devices("A100-80G")[1], parse_devices("RTX3090")[1]
    assert times["A100-80G", 2048, True].update.replicas == pytest.approx(weights * 2 / 2 / fast.link)
    assert times["A100-80G", 2048, False].update.replicas == pytest.approx(weights * (2 + 2 / 2) / fast.link)
    hidden = times["RTX3090", 32, True].backward.total
    assert times["RTX3090", 32, True].update.replicas == pytest.approx(weights * (2 + 2 / 2) / slow.link - hidden)


def test_on_a_cpu_sums_of_replicas_hide_behind_nothing(tmp_path: Path) -> None:
    """The cores that compute also send."""
    spec, config = llama(tmp_path), config_of(tmp_path, 1, 2, bf16={"enabled": True}, fp16={})
    basis = replace(basis_of(spec, config), device=CPU)
    weights = sum(shape.numel() for shape in spec.shapes(1).values())
    assert layer_times(basis)[1].update.replicas == pytest.approx(weights * (2 + 2 / 2) / CPU.link)


def test_offloaded_activations_take_what_the_computation_does_not_hide(tmp_path: Path) -> None:
    """A recomputed block sends one hidden state and computes long; all that a plain one keeps takes the bus longer."""
    spec = llama(tmp_path)
    exposed = {}
    for recompute in (True, False):
        config = config_of(tmp_path, 1, use_grad_ckpt=recompute, offload_activations=True)
        time = layer_times(basis_of(spec, config, "H100"))[1]
        exposed[recompute] = time.forward.offload, time.backward.offload
        plain = layer_times(basis_of(spec, config.model_copy(update={"offload_activations": False}), "H100"))[1]
        assert plain.forward.offload == plain.backward.offload == 0
        assert time.forward.total - exposed[recompute][0] == pytest.approx(plain.forward.total)
    assert exposed[True] == (0, 0)
    assert exposed[False][0] > exposed[False][1] > 0


def test_sums_cross_the_bus_in_each_micro_batch_and_only_what_takes_longer_than_it_counts(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    exposed = {}
    for rows in (1, 64):
        config = config_of(
            tmp_path, 1, zero_optimization=zero, bf16={"enabled": True}, fp16={}, train_micro_batch_size_per_gpu=rows
        )
        plain = layer_times(basis_of(spec, config, "H100"))[1]
        time = layer_times(basis_of(spec, config.model_copy(update={"offload_gradients": True}), "H100"))[1]
        assert time.forward == plain.forward
        exposed[rows] = time.backward.offload
        weights = sum(shape.numel() for shape in spec.shapes(1).values())
        assert exposed[rows] == pytest.approx(max(0.0, weights * 4 * 2 / HOST - plain.backward.total))
    assert exposed[1] > exposed[64] == 0


def test_products_add_to_sums_where_gradients_are_put_off(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    bf16: dict[str, Any] = {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
    embedding, block = (
        [
            layer_times(basis_of(spec, config_of(tmp_path, 8, schedule=schedule, **bf16), "H100"))[layer].backward.sums
            for schedule in ("1f1b", "dualpipev")
        ]
        for layer in (0, 1)
    )
    assert embedding[0] == embedding[1]
    assert block[1] == pytest.approx(6 / 10 * block[0])


def test_the_shares_of_a_step_add_up(tmp_path: Path) -> None:
    plan = Plan.make(basis_of(llama(tmp_path), config_of(tmp_path, 4, 2), "A100-80G"))
    table = times_table(plan)
    kinds = [str(column.header) for column in table.columns]
    assert kinds[0] == "stage" and kinds[-1] == "waiting" and "launches" not in kinds and "replicas" in kinds
    for row in zip(*(column.cells for column in table.columns[1:]), strict=True):
        assert sum(float(str(cell).rstrip("%")) for cell in row) == pytest.approx(100, abs=0.5)
    loss = [stage.spent.loss for stage in plan.stages]
    assert loss[:-1] == [0.0] * 3 and loss[-1] > 0


def test_spent_adds_kind_by_kind() -> None:
    total = Spent(products=1.0, sums=2.0) + Spent(sums=3.0, optimizer=4.0).times(2)
    assert total == Spent(products=1.0, sums=8.0, optimizer=8.0) and total.total == 17.0
