"""What a layer does by the count on fake tensors: against a real pass, and against FLOPs counted from weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.api import read_spec
from models.costs import LayerCase, ModelFlops, Operation, Recorder, work_of
from models.layers import Block
from models.spec import ModelSpec
from tests.conftest import TINY

ROWS, LENGTH = 2, 40
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def spec_of(folder: Path, **fields: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**TINY, "n_head": 4, **fields}), encoding="utf-8")
    return read_spec(folder)


def flops(operations: Iterable[Operation], kind: str) -> float:
    return sum(operation.flops for operation in operations if operation.kind == kind)


def moved(operations: Iterable[Operation], kind: str) -> int:
    return sum(operation.bytes for operation in operations if operation.kind == kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2", "qwen3", "phi3"])
def test_kernels_are_those_of_a_real_pass(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model_type=family)
    spec.set_attention(spec.attention[0])
    positions = spec.positions()
    module = spec.build(1, positions).to(dtype)
    assert isinstance(module, Block)
    ids = torch.arange(LENGTH).repeat(ROWS, 1)
    hidden = torch.randn(ROWS, LENGTH, spec.config.hidden_size, dtype=dtype, requires_grad=True)
    arguments = positions(module.kind, hidden, ids)
    with Recorder() as forward:
        output = module._run(hidden, ids, arguments)[0]
    with Recorder() as backward:
        torch.autograd.grad(output, [hidden, *module.parameters()], torch.empty_like(output))
    work = work_of(spec, LayerCase(1, ROWS, LENGTH, dtype))
    for real, counted in ((forward.noted, work.forward), (backward.noted, work.backward)):
        assert Counter(each.kind for each in real) == Counter(each.kind for each in counted)
        for kind in ("products", "attention"):
            assert flops(real, kind) == flops(counted, kind)
        for kind in ("products", "attention", "traffic"):
            assert moved(real, kind) == pytest.approx(moved(counted, kind), rel=0.01)


@pytest.mark.parametrize("fields", [{"model_type": "llama"}, {"model_type": "mixtral", **EXPERTS}], ids=str)
def test_flops_are_those_of_the_model(fields: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of(tmp_path, **fields)
    work = work_of(spec, LayerCase(1, ROWS, LENGTH, torch.float32))
    both = [*work.forward, *work.backward]
    counted = flops(both, "products") + flops(work.forward, "attention") * 3  # the scores again are not counted
    assert counted == ModelFlops(spec).by_layer([LENGTH] * ROWS, 0)[1]


def test_bytes_of_a_norm(tmp_path: Path) -> None:
    """In bf16: widened 2 + 4, squared 4 + 4, averaged 4, scaled 4 + 4, rounded 4 + 2, by the weight 2 + 2."""
    spec = spec_of(tmp_path, model_type="llama")
    work = work_of(spec, LayerCase(spec.n_layers - 1, ROWS, LENGTH, torch.bfloat16))
    assert moved(work.forward, "traffic") == pytest.approx(36 * ROWS * LENGTH * spec.config.hidden_size, rel=0.02)


def test_compiled_blocks_move_less_in_fewer_kernels(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model_type="llama")
    case = LayerCase(1, ROWS, LENGTH, torch.bfloat16)
    eager, compiled = (work_of(spec, case, compiled=on) for on in (False, True))
    for before, after in ((eager.forward, compiled.forward), (eager.backward, compiled.backward)):
        assert len(after) < len(before) / 2
        assert moved(after, "traffic") < 0.6 * moved(before, "traffic")
        assert flops(after, "products") == flops(before, "products")
        assert moved(after, "products") == moved(before, "products")


def test_scores_in_memory_are_counted_by_the_row(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model_type="gemma2")
    short, long = (work_of(spec, LayerCase(1, 1, length, torch.float32)) for length in (256, 512))
    assert not flops(short.forward, "attention")
    assert moved(long.forward, "traffic") > 2.5 * moved(short.forward, "traffic")
    flash = work_of(spec, LayerCase(1, 1, 512, torch.float32, flash=True))
    assert flops(flash.forward, "attention") and moved(flash.forward, "traffic") < moved(long.forward, "traffic") / 2


@pytest.mark.parametrize("flash", [False, True])
def test_attention_through_a_window_grows_with_the_row_alone(flash: bool, tmp_path: Path) -> None:
    """Half of what is counted a kernel skips, so a token counts twice the keys that it sees."""
    window = 1024
    spec = spec_of(tmp_path, model_type="mistral", sliding_window=window, max_position_embeddings=65536)
    query = spec.config.num_attention_heads * spec.config.head_dim
    for length in (8 * window, 16 * window):
        work = work_of(spec, LayerCase(1, 1, length, torch.bfloat16, flash))
        assert flops(work.forward, "attention") == pytest.approx(4.0 * length * query * 2 * window, rel=0.1)
