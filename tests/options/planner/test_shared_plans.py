"""Plans of processes that share rows or layers: what each keeps and sends, which links that takes, what is proposed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.spec import ModelSpec
from options.planner.command import plan_run
from options.planner.communication import KNOWN, Fabric, layer_messages
from options.planner.costs import layer_times
from options.planner.inputs import Basis, Workload
from options.planner.plan import Plan
from options.planner.saved import saved_tensors
from options.planner.search import candidates, search
from tests.options.planner.helpers import config_of, spec_of
from tests.options.planner.test_command import arguments
from training.config.deepspeed_config import check_sharing
from training.config.model_topo import ModelTopo
from training.errors import ConfigError
from training.metrics.devices import parse_devices

LENGTH = 8192
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LARGE: dict[str, tuple[dict[str, Any], int, int]] = {  # fields of config.json, rows of a step, GPUs
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
        256,
        16,
    ),
    "Llama-3.1-70B": (
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        256,
        64,
    ),
    "Qwen3-235B-A22B": (
        {"model_type": "qwen3_moe", "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64}
        | {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True},
        1024,
        128,
    ),
}
DEVICE = parse_devices("8xH100-80G")[1]
LINKS = Fabric.named("nvlink4,ib400", DEVICE)


def topo(*dims: int, sequence: int = 1) -> ModelTopo:
    axes = ["pipe", "data", "model"][: len(dims)]
    return ModelTopo.model_validate({"process_topology": {"axes": axes, "dims": list(dims)}, "sequence": sequence})


def basis(spec: ModelSpec, folder: Path, wanted: ModelTopo, **keys: Any) -> Basis:
    usual: dict[str, Any] = {
        "bf16": {"enabled": True},
        "fp16": {},
        "max_seq_len": LENGTH,
        "use_flash_attn": True,
        "train_batch_size": 16,
    }
    config = config_of(folder, 1, **(usual | keys)).model_copy(update={"model_topo": wanted})
    return Basis(config, spec, Workload.assumed(config), DEVICE, named=LINKS)


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return spec_of(tmp_path, LLAMA)


def test_a_block_sends_what_can_be_counted_by_hand(spec: ModelSpec, tmp_path: Path) -> None:
    """A llama of 32 heads of 128 numbers, 8 of them with keys, in bf16."""
    alone, shared, wide = (basis(spec, tmp_path, each) for each in (topo(1, 4), topo(1, 4, sequence=4), topo(1, 1, 4)))
    assert not any(each.exchanged or each.summed for each in layer_messages(alone, 1))
    tokens = LENGTH / 4
    for sent in layer_messages(shared, 1):
        assert sent.exchanged == [tokens * 128 * 2 * heads for heads in (32, 8, 8, 32)] and not sent.summed
        assert sent.sent(shared.config.model_topo) == (0.75 * sum(sent.exchanged), 0)
    for sent in layer_messages(wide, 1):
        assert sent.summed == [LENGTH * 4096 * 2] * 2 and not sent.exchanged
        assert sent.sent(wide.config.model_topo) == (0, 2 * 0.75 * sum(sent.summed))
    both = layer_messages(basis(spec, tmp_path, topo(1, 16, 2, sequence=16)), 1)[0]
    assert both.exchanged == [LENGTH / 16 * 128 * 2 * heads for heads in (16, 16, 16, 16)]  # 4 key heads are repeated


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_process_has_its_part(size: int, spec: ModelSpec, tmp_path: Path) -> None:
    alone = basis(spec, tmp_path, topo(1, 8))
    shared, wide = basis(spec, tmp_path, topo(1, 8, sequence=size)), basis(spec, tmp_path, topo(1, 1, size))
    assert saved_tensors(shared)[1].inside == pytest.approx(saved_tensors(alone)[1].inside / size, rel=0.05)
    assert shared.parameters == alone.parameters
    norms = 2 * 4096
    assert wide.parameters[1] == (alone.parameters[1] - norms) / size + norms
    assert sum(wide.parameters) == pytest.approx(sum(alone.parameters) / size, rel=0.001)
    times = [layer_times(each)[1].forward for each in (alone, shared, wide)]
    assert times[1].exchanges > 0 and times[2].all_reduces > 0 and times[0].exchanges == times[0].all_reduces == 0
    for faster in times[1:]:
        assert faster.products == pytest.approx(times[0].products / size, rel=0.2)


def test_the_links_that_messages_take_follow_from_the_order_of_axes() -> None:
    wanted = topo(4, 2, 8)
    assert LINKS.group(wanted.sharing("layers")).hosts == 1 and LINKS.group(wanted.along("data")).hosts == 2
    assert LINKS.to_next(wanted) == [KNOWN["ib400"]] * 3
    turned = ModelTopo.model_validate({"process_topology": {"axes": ["model", "data", "pipe"], "dims": [8, 2, 4]}})
    assert LINKS.group(turned.sharing("layers")).hosts == 8 and LINKS.to_next(turned) == [KNOWN["nvlink4"]] * 3
    inside, across = LINKS.group(wanted.sharing("layers")), LINKS.group(turned.sharing("layers"))
    assert across.all_reduce(1e9) > 5 * inside.all_reduce(1e9) > 0
    assert inside.all_reduce(1e9) == pytest.approx(
        2 * (7 / 8 * 1e9 / KNOWN["nvlink4"].bandwidth + 7 * inside.inside.latency)
    )


@pytest.mark.parametrize("links", ["nvlink4", "nvlink4,token-ring", "ib400,,", ""])
def test_links_that_nobody_knows_are_refused(links: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--links: .*: expected the link inside of a host and the one between .*ib400"
    ):
        Fabric.named(links, DEVICE)


@pytest.mark.slow
def test_the_search_shares_long_rows(spec: ModelSpec, tmp_path: Path) -> None:
    """A row of 131,072 tokens on eight GPUs with 80 GB."""
    best = search(basis(spec, tmp_path, topo(1, 8), max_seq_len=131072), 8)
    assert best and all(plan.fits for plan in best)
    assert best[0].basis.config.model_topo.sequence > 1
    assert 0.3 < (best[0].mfu or 0) < 0.6
    speeds = [plan.tokens_per_s for plan in best]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_the_search_proposes_what_holds_large_models(name: str, tmp_path: Path) -> None:
    """One row at a time, in 1f1b."""
    fields, rows, gpus = LARGE[name]
    asked = basis(spec_of(tmp_path, LLAMA | fields), tmp_path, topo(1, 1), max_seq_len=4096, train_batch_size=rows)
    best = search(asked, gpus, fixed=("train_micro_batch_size_per_gpu", "schedule"))
    assert best and all(plan.fits and 0.1 < (plan.mfu or 0) < 0.5 for plan in best)
    for plan in best:
        wanted = plan.basis.config.model_topo
        assert wanted.stages * wanted.replicas * wanted.tensor == gpus
        assert LINKS.group(wanted.sharing("layers")).hosts == 1
        assert wanted.sequence == 1  # rows of 4,096 tokens are not long
    assert any(plan.basis.config.model_topo.tensor > 1 for plan in best)


def test_what_a_search_proposes_is_what_a_run_would_take(tmp_path: Path) -> None:
    """Twelve heads, three of them with keys: as much as the run's own checks allow, on six GPUs; spread experts only
    where there are processes to spread them over."""
    spec = spec_of(
        tmp_path,
        LLAMA
        | {"model_type": "mixtral", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 4}
        | {"num_attention_heads": 12, "num_key_value_heads": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    )
    wanted = topo(1, 1, 6).model_copy(update={"experts": "spread"})
    asked = basis(spec, tmp_path, wanted, max_seq_len=65536, train_batch_size=12)
    grids = [each.config.model_topo for each in candidates(asked, 6, ())]
    assert {each.tensor for each in grids} == {1, 2, 3} and {each.sequence for each in grids} == {1, 2, 3, 6}
    assert all((each.experts == "spread") == (each.tensor > 1) for each in grids)
    for each in grids:
        check_sharing(asked.config.model_copy(update={"model_topo": each}), spec)
        assert ModelTopo.model_validate(each.model_dump()) == each


def test_what_lies_whole_between_products_is_gathered(tmp_path: Path) -> None:
    """Phi-3's queries, keys and values come from one product, and so do both halves of its MLP."""
    spec = spec_of(tmp_path, LLAMA | {"model_type": "phi3", "pad_token_id": 0})
    forward, backward = layer_messages(basis(spec, tmp_path, topo(1, 1, 2)), 1)
    a_number = LENGTH * 2
    assert forward.gathered == [a_number * (4096 + 2 * 1024), a_number * 2 * 14336]
    assert backward.gathered == [a_number * 4096, a_number * 14336]
    assert forward.sent(topo(1, 1, 2))[1] == 0.5 * (2 * sum(forward.summed) + sum(forward.gathered))


def test_a_plan_refuses_what_its_run_would(tmp_path: Path) -> None:
    spec_of(tmp_path, LLAMA)
    config = config_of(tmp_path, 1).model_copy(update={"model_topo": topo(1, 3, sequence=3)})
    with pytest.raises(ConfigError, match=r"^model_topo.sequence: 3 does not divide the 32 heads"):
        plan_run(config, arguments(devices="3xH100"))


def test_a_model_that_stages_alone_hold_badly_is_shared(spec: ModelSpec, tmp_path: Path) -> None:
    """With as many micro-batches as stages, a pipeline waits; shared layers do not."""
    staged, shared = (
        Plan.make(basis(spec, tmp_path, each, train_batch_size=8)) for each in (topo(8, 1), topo(2, 1, 4))
    )
    assert shared.bubble < staged.bubble and math.isfinite(shared.seconds)
    slow = replace(shared.basis, named=Fabric.named("pcie4,eth10", DEVICE, per_host=1))
    assert Plan.make(slow).seconds > 2 * shared.seconds
