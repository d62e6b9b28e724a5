"""fp8 in the plan: faster products, more traffic, no other memory between the passes, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.architectures.llama import FAMILY
from models.attention.kernels import EAGER as OWN
from models.spec import ModelSpec
from options.planner.costs import CASTS_COMPILED, CASTS_EAGER, Roofline, in_fp8, layer_times
from options.planner.inputs import Basis
from options.planner.layer_costs import LayerCase, product, work_of
from options.planner.plan import Plan
from options.planner.search import search
from options.planner.tables import plan_summary
from tests.options.planner.helpers import basis_of, config_of, llama
from training.config.deepspeed_config import check_fp8
from training.errors import ConfigError
from training.metrics.devices import parse_devices

OWN_ATTENTION = replace(FAMILY, attention=(OWN,))
BF16: dict[str, Any] = {"bf16": {"enabled": True}, "fp16": {"enabled": False}, "use_flash_attn": True}
FP8: dict[str, Any] = BF16 | {"fp8": {"enabled": True}}


def basis(folder: Path, keys: dict[str, Any], device: str = "H100", stages: int = 1, **more: Any) -> Basis:
    return basis_of(llama(folder), config_of(folder, stages, **keys, use_grad_ckpt=False, **more), device)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_product_gets_twice_the_rate_after_its_factors_are_rounded(compiled: bool) -> None:
    device = parse_devices("H100")[1]
    large = product(128 * 132, 8192, 128 * 66, 2, 2)
    *casts, multiplied = in_fp8([large], compiled)
    roofline = Roofline(device, torch.bfloat16, 1, 1.0)
    seconds = [roofline.seconds(each) - device.kernel for each in (large, multiplied)]
    assert seconds[0] / seconds[1] == pytest.approx(1979 / 989)
    factors = 8192 * (128 * 132 + 128 * 66)
    assert multiplied.bytes == factors + 2 * 128 * 132 * 128 * 66
    assert {each.kind for each in casts} == {"traffic"}
    assert sum(each.bytes for each in casts) == factors * sum(CASTS_COMPILED if compiled else CASTS_EAGER)


def test_what_weights_are_rounded_to_before_is_not_counted(tmp_path: Path) -> None:
    """Each weight is a factor once forward and once backward, of the gradient of what it multiplied."""
    work = basis(tmp_path, FP8, compile=True).once(work_of, LayerCase(1, 1, 512, torch.bfloat16, flash=True), True)
    weights = 4 * 4096 * 4096 + 3 * 11008 * 4096
    for operations in (work.forward, work.backward):
        before, after = (sum(each.bytes for each in in_fp8(operations, True, rounded)) for rounded in (False, True))
        assert before - after == weights * sum(CASTS_COMPILED)


def test_the_eager_passes_are_those_of_torchao() -> None:
    """Counted as torch makes them: operations on whole factors, with what they read and write."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    moved: list[float] = []

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            tensors = [each for each in (*args, result) if isinstance(each, torch.Tensor) and each.numel() > 1]
            if tensors and type(result) is torch.Tensor and result.data_ptr() != args[0].data_ptr():
                moved.append(sum(each.nbytes for each in tensors) / factor.numel())
            return result

    factor = torch.randn(64, 64, dtype=torch.bfloat16)
    with Passes():
        hp_tensor_to_float8_dynamic(factor, torch.float8_e4m3fn, LinearMMConfig())
    assert moved == list(CASTS_EAGER)


@pytest.mark.parametrize("eager", [False, True])
def test_linear_layers_alone_are_in_fp8(eager: bool, tmp_path: Path) -> None:
    """Where the layer's own arithmetic is attention, its scores are products too, several at a time."""
    bases = [basis(tmp_path, keys | {"use_flash_attn": not eager}, compile=True) for keys in (BF16, FP8)]
    if eager:
        bases = [replace(each, spec=replace(each.spec, family=OWN_ATTENTION)) for each in bases]
    plain, faster = map(layer_times, bases)
    assert plain[0] == faster[0] and plain[-1] == faster[-1]
    ratio = plain[1].forward.products / faster[1].forward.products
    assert 1.2 < ratio < 1.9 if eager else ratio == pytest.approx(2, rel=0.05)
    assert faster[1].forward.attention == plain[1].forward.attention
    assert faster[1].forward.traffic > plain[1].forward.traffic


def test_it_pays_compiled_and_costs_eager(tmp_path: Path) -> None:
    """torchao tells of up to 1.25 for llama-3-8b on eight H100s (docs.pytorch.org/ao, Quantized Training)."""
    speeds = {
        (compiled, bool(keys.get("fp8"))): Plan.make(basis(tmp_path, keys, compile=compiled)).tokens_per_s
        for compiled in (True, False)
        for keys in (BF16, FP8)
    }
    assert 1.1 < speeds[True, True] / speeds[True, False] < 1.4
    assert speeds[False, True] < speeds[False, False]


def test_rounding_takes_memory_in_a_block_alone(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"compile": False, "zero_optimization": {"stage": 1}}
    plain, faster = (Plan.make(basis(tmp_path, each, stages=4, **keys)).stages for each in (BF16, FP8))
    for before, after in zip(plain, faster, strict=True):
        more = after.memory.activations - before.memory.activations
        assert 0 <= more <= 9 * 11008 * 4096  # bytes of the largest weight
        states = [(each.weights, each.gradients, each.optimizer) for each in (before.memory, after.memory)]
        assert states[0] == states[1]
    assert faster[1].memory.activations > plain[1].memory.activations


def test_the_plan_says_it(tmp_path: Path) -> None:
    lines = plan_summary(Plan.make(basis(tmp_path, FP8)))
    assert "products of the blocks: fp8, at best 1,979 TFLOP/s; MFU is of bf16's peak" in lines
    on_a100 = Plan.make(basis(tmp_path, FP8, "A100-80G"))
    assert on_a100.seconds == Plan.make(basis(tmp_path, BF16, "A100-80G")).seconds


def test_mfu_is_of_the_peak_in_bf16(tmp_path: Path) -> None:
    plain, faster = (Plan.make(basis(tmp_path, keys, compile=True)) for keys in (BF16, FP8))
    assert plain.mfu and faster.mfu
    assert faster.mfu / plain.mfu == pytest.approx(plain.seconds / faster.seconds)


def test_the_search_leaves_out_what_the_config_refuses(tmp_path: Path) -> None:
    config = config_of(tmp_path, 4, train_batch_size=64, **FP8)
    found = search(basis_of(llama(tmp_path), config, "H200"), 8)
    assert found and all(plan.basis.config.schedule == "1f1b" for plan in found)


def test_a_model_that_cannot_is_refused(tmp_path: Path) -> None:
    spec: ModelSpec = llama(tmp_path, intermediate_size=11000)
    check_fp8(config_of(tmp_path, 1, **BF16), spec)
    with pytest.raises(ConfigError, match=r"^fp8.enabled: a linear layer .* 11000 features, .*; expected false$"):
        check_fp8(config_of(tmp_path, 1, **FP8), spec)
