"""The plan of plain ZeRO: what a process keeps by stage, and the messages of each micro-batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from options.planner import zero
from options.planner.communication import Fabric
from options.planner.costs import update_time
from options.planner.inputs import Basis
from options.planner.memory import StateBytes
from options.planner.plan import Plan
from tests.options.planner.helpers import basis_of, config_of, llama
from training.metrics.devices import parse_devices, this_device

BF16: dict[str, Any] = {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
P = 6_738_415_616


def basis(folder: Path, replicas: int, stage: int, more: dict[str, Any] | None = None, **keys: Any) -> Basis:
    section = {"stage": stage} | (more or {})
    return replace(
        basis_of(llama(folder), config_of(folder, 1, replicas, zero_optimization=section, **keys), "A100-80G"),
        in_stages=False,
    )


@pytest.mark.parametrize(
    ("stage", "more", "keys", "weights", "gradients", "optimizer"),
    [
        (1, {}, {}, 2, 2, 12 / 8),
        (2, {}, {}, 2, 2 / 8, 12 / 8),
        (3, {}, {}, 2 / 8, 2 / 8, 12 / 8),
        (3, {}, BF16, 2 / 8, 4 / 8, 12 / 8),
        (3, {"zero_hpz_partition_size": 4}, {}, 2 / 8 + 2 / 4, 2 / 8, 12 / 8),
        (2, {"offload_optimizer": {"device": "cpu"}}, BF16, 2, 0, 0),
    ],
)
def test_a_process_keeps_what_its_stage_leaves_it(
    stage: int,
    more: dict[str, Any],
    keys: dict[str, Any],
    weights: float,
    gradients: float,
    optimizer: float,
    tmp_path: Path,
) -> None:
    memory = Plan.make(basis(tmp_path, 8, stage, more, **keys)).stages[0].memory
    found = [memory.weights / P, memory.gradients / P, memory.optimizer / P]
    assert found == pytest.approx([weights, gradients, optimizer], abs=1e-6)


def test_gathered_weights_and_the_bucket_are_there_beside_activations(tmp_path: Path) -> None:
    small = {"reduce_bucket_size": 10**6, "stage3_max_live_parameters": 10**8}
    usual, less = (Plan.make(basis(tmp_path, 8, 3, more)).stages[0].memory.activations for more in ({}, small))
    assert usual - less == 2 * (5 * 10**8 - 10**6) + 2 * (10**9 - 10**8)


def test_a_micro_batch_gathers_twice_and_reduces_once(tmp_path: Path) -> None:
    of_3, of_2, of_1 = (basis(tmp_path, 8, stage) for stage in (3, 2, 1))
    block, link = sum(shape.numel() for shape in of_3.spec.shapes(1).values()), parse_devices("A100-80G")[1].link
    once = 7 / 8 * 2 * block / link
    forward, backward = zero.seconds(of_3, 1, 2)
    assert forward == pytest.approx(once, rel=1e-4) and backward == pytest.approx(2 * once, rel=1e-4)
    assert zero.seconds(of_2, 1, 2) == (0.0, pytest.approx(once))
    assert zero.seconds(of_1, 1, 2) == (0.0, 0.0)


def test_neighbours_gather_by_the_links_inside_a_host(tmp_path: Path) -> None:
    device = parse_devices("A100-80G")[1]
    fabric = Fabric.named("nvlink3,ib200", device)
    far, near = (
        zero.seconds(replace(basis(tmp_path, 16, 3, more), named=fabric), 1, 2)
        for more in ({}, {"zero_hpz_partition_size": 8})
    )
    assert near[0] == far[0]
    assert near[1] < far[1]


def test_small_weights_stay_whole(tmp_path: Path) -> None:
    whole = basis(tmp_path, 8, 3, {"stage3_param_persistence_threshold": P})
    assert zero.seconds(whole, 1, 2)[0] == 0.0


def test_without_stages_sums_come_after_the_backward_pass(tmp_path: Path) -> None:
    """DeepSpeed sums there, and Pipetune in a pipeline, while it computes."""
    late = basis(tmp_path, 8, 1)
    early = replace(late, in_stages=True)
    spent = [Plan.make(each).stages[0].spent.replicas for each in (late, early)]
    assert spent[0] > spent[1] > 0


def test_masters_in_bf16_are_counted_with_an_offloaded_optimizer(tmp_path: Path) -> None:
    """DeepSpeed holds the weight and its gradient in bf16 then, and the moments where its Adam is told so."""
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    masters = {"enabled": True, "bf16_master_weights_and_grads": True}
    narrow = {"type": "AdamW", "params": {"fp32_optimizer_states": False}}
    config = partial(config_of, tmp_path, 2, fp16={"enabled": False}, zero_optimization=offload)
    found = [
        StateBytes.of(config(bf16={"enabled": True})),
        StateBytes.of(config(bf16=masters)),
        StateBytes.of(config(bf16=masters | {"bf16_optimizer_states": True}, optimizer=narrow)),
    ]
    assert [each.host for each in found] == [18, 14, 10]
    # The weight in the checkpoint, its master and both moments; a gradient is not saved.
    assert [each.checkpoint(1) for each in found] == [2 + 12, 2 + 10, 2 + 6]
    # 46 bytes cross main memory for a parameter; of fewer bytes are the master in three passes and its gradient in
    # four, and the two moments in two each.
    assert [each.spared for each in found] == [0, 7 * 2, 7 * 2 + 2 * 4]
    apart = StateBytes.of(config(bf16=masters, offload_gradients=True))
    assert (apart.host, apart.checkpoint(1)) == (14 + 4, 12), "fp32 sums do not fit into the master's gradient"
    assert update_time(config(bf16=masters), this_device()) < update_time(config(bf16={"enabled": True}), this_device())
