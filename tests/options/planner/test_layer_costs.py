"""FLOPs, kernels and saved bytes of a layer, counted on fake tensors, against a real pass and torch's own counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from models.adapters import Lora, Trained
from models.api import read_spec
from models.flops import ModelFlops
from models.layers import Block, Head
from models.spec import ModelSpec
from models.weight_gradients import WeightGradients
from options.planner.layer_costs import LayerCase, Operation, OperationRecorder, saved_by, work_of
from tests.models.helpers import saved_tensors, spec_of

ROWS, LENGTH = 2, 40
HALVES = [torch.float32, torch.bfloat16]
SAVED = "llama bloom qwen3 gemma2 gemma3_text phi3 olmo2 glm4 baichuan chatglm".split()


def flops(operations: Iterable[Operation], kind: str) -> float:
    return sum(operation.flops for operation in operations if operation.kind == kind)


def moved(operations: Iterable[Operation], kind: str) -> int:
    return sum(operation.bytes for operation in operations if operation.kind == kind)


def sizes(values: Any) -> dict[int, int]:
    """Bytes by storage."""
    storages = [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def real_layer(spec: ModelSpec, layer: int, dtype: torch.dtype) -> tuple[Any, Tensor, Any, Callable[[], Tensor]]:
    """A real layer with its input, its arguments and its forward pass."""
    positions = spec.positions()
    module = spec.build(layer, positions).to(dtype)
    assert isinstance(module, (Block, Head))
    hidden = torch.randn(ROWS, LENGTH, spec.config.hidden_size, dtype=dtype, requires_grad=True)
    ids = torch.arange(LENGTH).repeat(ROWS, 1)
    arguments = positions(module.kind, hidden, ids) if isinstance(module, Block) else {}

    def run() -> Tensor:
        return module._run(hidden, ids, arguments)[0] if isinstance(module, Block) else module.norm(hidden)

    return module, hidden, arguments, run


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "head_dim": 32, "tie_word_embeddings": True},
        {"model_type": "bloom"},
        {"model_type": "qwen3"},
        {"model_type": "mixtral"},
        {"model_type": "gemma2", "sliding_window": 4096},
    ],
    ids=str,
)
def test_flops_of_a_model_are_those_that_torch_counts(
    fields: dict[str, Any], make_checkpoint: Callable[..., Path]
) -> None:
    folder = make_checkpoint(**fields)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(3, 500, (2, 96))).logits.sum().backward()
    found = sum(ModelFlops(read_spec(folder)).by_layer([96] * 2, 2 * 96))
    assert found == pytest.approx(float(counter.get_total_flops()), rel=0.02)


def test_only_what_is_needed_counts() -> None:
    """Samples attend to themselves; the head counts trained tokens; a window limits keys, a router experts."""
    model = ModelFlops(spec_of("llama"))
    long, two, short = (model.by_layer(lengths, 0)[1] for lengths in ([30], [10, 20], [10]))
    pair = (long - two) / (30**2 - 10**2 - 20**2)
    assert pair == 12 * 64  # heads x head_dim
    assert two - 20**2 * pair - short == 2 * (short - 10**2 * pair)  # 20 tokens and 10
    assert model.by_layer([30], 7)[-1] == 7 * model.by_layer([30], 1)[-1]
    assert model.by_layer([30], 7)[:-1] == model.by_layer([30], 0)[:-1]
    gemma = ModelFlops(spec_of("gemma2", sliding_window=8))
    windowed, full = (gemma.by_layer([100], 0)[block] for block in (1, 2))
    assert full - windowed == pair * 100 * (100 - 8)
    two_experts, three_experts = (
        ModelFlops(spec_of("mixtral", num_local_experts=8, num_experts_per_tok=count)) for count in (2, 3)
    )
    found = zip(two_experts.by_layer([1], 0), three_experts.by_layer([1], 0), strict=True)
    assert [many - some for some, many in found] == [0, *[6 * (3 * 64 * 96)] * 3, 0]  # one expert more in each block


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2", "qwen3", "phi3"])
def test_kernels_are_those_of_a_real_pass(family: str, dtype: torch.dtype) -> None:
    spec = spec_of(family)
    module, hidden, _, run = real_layer(spec, 1, dtype)
    with OperationRecorder() as forward:
        output = run()
    with OperationRecorder() as backward:
        torch.autograd.grad(output, [hidden, *module.parameters()], torch.empty_like(output))
    work = work_of(spec, LayerCase(1, ROWS, LENGTH, dtype))
    for real, counted in ((forward.noted, work.forward), (backward.noted, work.backward)):
        assert Counter(each.kind for each in real) == Counter(each.kind for each in counted)
        for kind in ("products", "attention"):
            assert flops(real, kind) == flops(counted, kind)
        for kind in ("products", "attention", "traffic"):
            assert moved(real, kind) == pytest.approx(moved(counted, kind), rel=0.01)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_flops_of_the_kernels_are_those_of_the_model(family: str) -> None:
    spec = spec_of(family, num_local_experts=4)
    work = work_of(spec, LayerCase(1, ROWS, LENGTH, torch.float32))
    both = [*work.forward, *work.backward]
    counted = flops(both, "products") + flops(work.forward, "attention") * 3  # the scores again are not counted
    assert counted == ModelFlops(spec).by_layer([LENGTH] * ROWS, 0)[1]


def test_bytes_of_a_norm() -> None:
    """In bf16: widened 2 + 4, squared 4 + 4, averaged 4, scaled 4 + 4, rounded 4 + 2, by the weight 2 + 2."""
    spec = spec_of("llama")
    work = work_of(spec, LayerCase(spec.n_layers - 1, ROWS, LENGTH, torch.bfloat16))
    assert moved(work.forward, "traffic") == pytest.approx(36 * ROWS * LENGTH * spec.config.hidden_size, rel=0.02)


def test_compiled_blocks_move_less_in_fewer_kernels() -> None:
    spec = spec_of("llama")
    case = LayerCase(1, ROWS, LENGTH, torch.bfloat16)
    eager, compiled = (work_of(spec, case, compiled=on) for on in (False, True))
    for before, after in ((eager.forward, compiled.forward), (eager.backward, compiled.backward)):
        assert len(after) < len(before) / 2
        assert moved(after, "traffic") < 0.6 * moved(before, "traffic")
        assert flops(after, "products") == flops(before, "products")
        assert moved(after, "products") == moved(before, "products")


def test_scores_in_memory_grow_with_the_square_of_the_row() -> None:
    spec = spec_of("gemma2")
    short, long = (work_of(spec, LayerCase(1, 1, length, torch.float32)) for length in (256, 512))
    assert not flops(short.forward, "attention")
    assert moved(long.forward, "traffic") > 2.5 * moved(short.forward, "traffic")
    flash = work_of(spec, LayerCase(1, 1, 512, torch.float32, flash=True))
    assert flops(flash.forward, "attention") and moved(flash.forward, "traffic") < moved(long.forward, "traffic") / 2


@pytest.mark.parametrize("flash", [pytest.param(False, marks=pytest.mark.slow), True])
def test_attention_through_a_window_grows_with_the_row_alone(flash: bool) -> None:
    """A kernel skips half of what is counted, so a token counts twice the keys that it sees."""
    window = 1024
    spec = spec_of("mistral", sliding_window=window, max_position_embeddings=65536)
    query = spec.config.num_attention_heads * spec.config.head_dim
    for length in (8 * window, 16 * window):
        work = work_of(spec, LayerCase(1, 1, length, torch.bfloat16, flash))
        assert flops(work.forward, "attention") == pytest.approx(4.0 * length * query * 2 * window, rel=0.1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", SAVED)
def test_saved_bytes_are_those_of_a_real_pass(family: str, dtype: torch.dtype) -> None:
    spec = spec_of(family)
    for layer in (1, spec.n_layers - 1):
        module, _, arguments, run = real_layer(spec, layer, dtype)
        with saved_tensors() as kept:
            output = run()
        given = sizes([arguments, *module.parameters()])
        measured = sum(size for storage, size in sizes(kept).items() if storage not in given)
        assert output.requires_grad
        assert saved_by(spec, LayerCase(layer, ROWS, LENGTH, dtype)).inside == pytest.approx(measured, rel=0.01)


def test_experts_keep_what_the_tokens_sent_to_them_need() -> None:
    case, kept = LayerCase(1, 1, 512, torch.float32), {}
    for count in (1, 2, 4):
        spec = spec_of("mixtral", num_local_experts=8, num_experts_per_tok=count)
        kept[count] = saved_by(spec, case).inside
    assert kept[4] - kept[2] == pytest.approx(2 * (kept[2] - kept[1]), rel=0.01)
    assert kept[2] - kept[1] > 512 * 4 * (64 + 2 * 96 + 96)  # input, both products, what is multiplied


@pytest.mark.parametrize("family", SAVED)
def test_bytes_kept_for_later_gradients_are_those_of_a_real_pass(family: str) -> None:
    spec = spec_of(family)
    block, _, _, run = real_layer(spec, 1, torch.float32)
    later = WeightGradients()
    later.defer(block)
    output = run()
    output.backward(torch.randn_like(output))
    later.close()
    (remembered,) = later._waiting
    measured = sum(sizes([inputs for _, inputs, _ in remembered]).values())
    measured += sum(gradient.nbytes for _, _, gradient in remembered)
    assert measured > 0
    assert saved_by(spec, LayerCase(1, ROWS, LENGTH, torch.float32)).waiting == measured


@pytest.mark.parametrize("model_type", ["llama", "mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_adapters_add_low_rank_products_and_take_gradients_of_weights_away(model_type: str) -> None:
    plain = spec_of(model_type, num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    lora = plain.training(Trained(Lora(r=1)))
    case = LayerCase(1, ROWS, LENGTH, torch.float32)
    before, after = work_of(plain, case), work_of(lora, case)
    forward = flops(after.forward, "products") / flops(before.forward, "products")
    backward = flops(after.backward, "products") / flops(before.backward, "products")
    assert 1.005 < forward < 1.06
    assert 0.5 < backward < 0.6
    weights = 4 * sum(shape.numel() for shape in plain.shapes(1).values() if len(shape) == 3)
    assert saved_by(lora, case).inside - saved_by(plain, case).inside < (weights or saved_by(plain, case).inside) / 2
