"""Shows that every family computes what transformers computes: logits, gradients, packed rows, recomputation, bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from models import load_model
from tests.models.helpers import (
    LAYOUTS,
    change_config,
    change_weights,
    copy_of,
    gradients,
    in_layout,
    oracle,
    random_ids,
    shifted_loss,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "bloom": ("bloom", {"tie_word_embeddings": True}),
    "bloom-untied": ("bloom", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-rope-scaling": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-some-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
}
LENGTH = 40  # longer than the windows


class Expected(NamedTuple):
    """What transformers makes of a checkpoint."""

    folder: Path
    ids: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def rough_checkpoint(make_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """A case's checkpoint with noise on norms and biases, which are all alike in a fresh model."""

    def roughen(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            if tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape), alpha=0.1)

    def make(case: str) -> Path:
        model_type, changes = CASES[case]
        folder = make_checkpoint(model_type, **changes)
        change_weights(folder, roughen)
        return folder

    return make


@pytest.fixture(scope="module", params=CASES)
def expected(request: pytest.FixtureRequest, rough_checkpoint: Callable[[str], Path]) -> Expected:
    folder = rough_checkpoint(request.param)
    ids = random_ids(2, LENGTH)
    model = oracle(folder)
    logits = model(ids, use_cache=False).logits
    shifted_loss(logits, ids).backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(named) == len(list(model.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in named.values())
    return Expected(folder, ids, logits.detach(), named)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients_equal_transformers(expected: Expected, layout: str, tmp_path: Path) -> None:
    model = load_model(in_layout(expected.folder, layout, tmp_path / "layers"))
    logits = model(expected.ids)
    torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=0)
    shifted_loss(logits, expected.ids).backward()
    torch.testing.assert_close(gradients(model), expected.gradients, atol=1e-6, rtol=1e-5)


def test_packed_documents_equal_separate_forwards(expected: Expected) -> None:
    model = load_model(expected.folder)
    cuts = [17, 25]  # each row holds two documents, cut in another place
    position_ids = torch.stack([torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]) for cut in cuts])
    with torch.inference_mode():
        packed = model(expected.ids, position_ids)
        for row, cut in enumerate(cuts):
            for document in (slice(0, cut), slice(cut, LENGTH)):
                alone = model(expected.ids[row : row + 1, document])
                torch.testing.assert_close(packed[row : row + 1, document], alone, atol=1e-5, rtol=0)
        assert not torch.allclose(packed, model(expected.ids), atol=1e-2), "the documents do not matter"


def test_recomputation_changes_no_gradient(expected: Expected) -> None:
    model = load_model(expected.folder).train()
    shifted_loss(model(expected.ids), expected.ids).backward()
    plain = gradients(model)
    model.zero_grad()
    runs = [0] * len(model.blocks)
    for number, block in enumerate(model.blocks):
        block.recompute = True

        def count(module: nn.Module, arguments: object, number: int = number) -> None:
            runs[number] += 1

        block.block.register_forward_pre_hook(count)
    shifted_loss(model(expected.ids), expected.ids).backward()
    torch.testing.assert_close(gradients(model), plain, atol=0, rtol=0)
    assert runs == [2] * len(model.blocks)


@pytest.mark.parametrize("case", ["mistral-window", "qwen2-some-windows", "llama-rope-scaling"])
def test_windows_and_rope_scaling_take_part(case: str, rough_checkpoint: Callable[[str], Path]) -> None:
    folder = rough_checkpoint(case)
    ids = random_ids(1, LENGTH)
    with torch.inference_mode():
        with_it = load_model(folder)(ids)
        plain = {"rope_theta": 10000.0, "rope_type": "default"}
        change_config(folder, sliding_window=None, use_sliding_window=False, layer_types=None, rope_parameters=plain)
        without = load_model(folder)(ids)
    assert (with_it - without).abs().max() > 1e-3


def test_training_may_reuse_the_position_ids_of_an_evaluation(make_checkpoint: Callable[..., Path]) -> None:
    model = load_model(make_checkpoint("llama"))
    ids, position_ids = random_ids(1, 8), torch.arange(8)[None]
    with torch.inference_mode():
        evaluated = model(ids, position_ids)
    logits = model(ids, position_ids)
    shifted_loss(logits, ids).backward()
    torch.testing.assert_close(logits, evaluated, atol=0, rtol=0)
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize("what", ["position ids", "dtype"])
def test_change_between_two_calls_is_noticed(make_checkpoint: Callable[..., Path], what: str) -> None:
    model = load_model(make_checkpoint("llama"))
    ids, position_ids = random_ids(1, 8), torch.arange(8)[None]
    with torch.no_grad():
        model(ids, position_ids)
        if what == "dtype":
            model.bfloat16()
        else:
            position_ids[0, 3:] -= 3
        again = model(ids, position_ids)
        torch.testing.assert_close(again, model(ids, position_ids.clone()), atol=0, rtol=0)


def test_field_names_of_older_transformers_mean_the_same(
    rough_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = rough_checkpoint("llama-rope-scaling")
    older = copy_of(folder, tmp_path / "older")
    scaling = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    change_config(older, rope_theta=10000.0, rope_scaling=scaling, torch_dtype="float32")
    raw = (older / "config.json").read_text().replace('"rope_parameters"', '"_1"').replace('"dtype"', '"_2"')
    (older / "config.json").write_text(raw)
    ids = random_ids(1, LENGTH)
    with torch.inference_mode():
        torch.testing.assert_close(load_model(older)(ids), load_model(folder)(ids), atol=0, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bf16_loading_gives_bf16_parameters(
    make_checkpoint: Callable[..., Path], stored: torch.dtype, layout: str, tmp_path: Path
) -> None:
    folder = in_layout(make_checkpoint("llama", dtype=stored), layout, tmp_path / "layers")
    model = load_model(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in load_model(folder).parameters()} == {stored}


def test_bf16_logits_equal_transformers(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("llama", rope_parameters=LLAMA3_ROPE, dtype=torch.bfloat16)
    ids = random_ids(2, LENGTH)
    with torch.inference_mode():
        expected_logits = oracle(folder, torch.bfloat16)(ids).logits
        torch.testing.assert_close(load_model(folder)(ids), expected_logits, atol=0, rtol=0)
