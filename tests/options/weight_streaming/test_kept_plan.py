"""Plans keep products of blocks in host memory where a step becomes shorter for it and a host has the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from options.planner.inputs import Basis
from options.weight_streaming.plan import KEPT_GAINS, MOST_KEPT, OF_KEPT, OF_MAIN_MEMORY, Streaming, divide
from options.weight_streaming.streamed_plan import StreamedPlan
from tests.options.planner.helpers import basis_of, config_of, llama
from tests.options.weight_streaming.test_plan import KEYS

TERABYTE, BLOCKS = 10**12, 4
FAST = {"use_flash_attn": True, "compile": True, "train_batch_size": 16}
PRODUCT = 2048 * 11008 * 2  # bytes: a row's tokens, and what gate_proj makes of each
KEPT_ON_DEVICE = f"{OF_KEPT} of two blocks"


def basis_with(folder: Path, memory: int | None, gpus: int = 2, **keys: Any) -> Basis:
    spec = llama(folder, num_hidden_layers=BLOCKS)
    basis = basis_of(
        spec, config_of(folder, gpus, **(KEYS | FAST | {"schedule": "weight_streaming"} | keys)), "RTX4090"
    )
    return replace(basis, main_memory=memory)


def best(basis: Basis) -> StreamedPlan:
    plan = Streaming(basis, basis.config.model_topo.stages).best()
    assert plan
    return plan


def test_products_are_kept_where_the_host_has_room(tmp_path: Path) -> None:
    """A plan counts their bytes on the links, the host and a device, and spares their work in backward turns."""
    basis = basis_with(tmp_path, TERABYTE)
    streaming, plan = Streaming(basis, 2), best(basis)
    kept = plan.slots.kept
    without = Streaming(replace(basis, main_memory=None), 2).best()
    assert kept and without and not without.slots.kept
    assert without.seconds > KEPT_GAINS * plan.seconds and without.host < plan.host
    assert plan.of_host[OF_KEPT] == plan.slots.a_round * BLOCKS * kept * PRODUCT
    assert plan.of_device[KEPT_ON_DEVICE] == 2 * kept * PRODUCT

    plain = streaming.slots(plan.slots.forward, plan.slots.backward)
    more = sum(turn.leaves for turn in plan.turns) - sum(turn.leaves for turn in plain)
    assert (
        more == sum(turn.enters for turn in plan.turns) - sum(turn.enters for turn in plain) == BLOCKS * kept * PRODUCT
    )
    spared = sum(turn.seconds for turn in plain) - sum(turn.seconds for turn in plan.turns)
    part = 11008 / (4 * 4096 + 3 * 11008)  # of a block's work, whose attention and norms take a little
    assert 0.8 < spared / (kept * BLOCKS * streaming.forward[1] * part) <= 1
    assert plan.turns[0].seconds == plain[0].seconds, "forward turns compute it"
    assert divide(basis).slots.kept == kept, "as a run does"


def test_each_product_more_needs_room_and_a_gain(tmp_path: Path) -> None:
    held = best(basis_with(tmp_path, None)).host
    tight = best(basis_with(tmp_path, int(held / OF_MAIN_MEMORY)))
    assert not tight.slots.kept and tight.fits, "what is not needed leaves a host a tenth of its memory"
    streaming = Streaming(basis_with(tmp_path, TERABYTE), 2)
    base = streaming.plans[0]
    sizes = [next(streaming.keeping([base], count)).host - base.host for count in range(1, MOST_KEPT + 1)]
    assert sizes == [count * base.slots.a_round * BLOCKS * PRODUCT for count in (1, 2)]


def test_the_log_says_what_is_kept(tmp_path: Path) -> None:
    kept = best(basis_with(tmp_path, TERABYTE)).describe()
    assert kept[1].endswith(" of each block, kept in host memory") and "all recompute but for " in kept[1]
    unknown = best(basis_with(tmp_path, None)).describe()
    assert unknown[1].endswith("; all recompute") and "--host-memory" in unknown[2]
    assert len(best(basis_with(tmp_path, 60 * 10**9)).describe()) == 2


@pytest.mark.parametrize("keys", [{"row_chunk": 1024}, {"lora": {"r": 8}}, {"fp8": {"enabled": True}}])
def test_chunks_keep_nothing_and_adapters_and_fp8_what_pays(keys: dict[str, Any], tmp_path: Path) -> None:
    basis = basis_with(tmp_path, TERABYTE, **keys)
    streaming = Streaming(basis, 2)
    with_one = list(streaming.keeping(streaming.plans, 1))
    assert bool(with_one) == ("row_chunk" not in keys)
    assert streaming.best()
