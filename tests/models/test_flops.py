"""Model FLOPs against torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from models.api import read_spec
from models.costs import ModelFlops

BATCH, LENGTH = 2, 96

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, wide heads and a tied head": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "bloom": ("bloom", {}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
    "gemma2 within its window": ("gemma2", {"sliding_window": 4096}),
}


def counted(folder: Path) -> float:
    """What torch counts in a forward and backward pass of transformers' model, all tokens supervised."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.randint(3, 500, (BATCH, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts(name: str, make_checkpoint: Callable[..., Path]) -> None:
    model_type, changes = MODELS[name]
    folder = make_checkpoint(model_type, **changes)
    found = sum(ModelFlops(read_spec(folder)).by_layer([LENGTH] * BATCH, BATCH * LENGTH))
    assert found == pytest.approx(counted(folder), rel=0.02)


def test_a_known_model_by_hand(tmp_path: Path) -> None:
    """Llama-7B, whose blocks have 6,476,005,376 weights in matrices and whose head has 131,072,000."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, '
        '"num_attention_heads": 32, "vocab_size": 32000}'
    )
    embedding, *blocks, head = ModelFlops(read_spec(tmp_path)).by_layer([2048], 2048)
    assert embedding == 0
    assert head == 2048 * 6 * 32000 * 4096
    assert blocks == [2048 * (6 * (4 * 4096**2 + 3 * 4096 * 11008) + 12 * 4096 * 2048)] * 32
    assert sum(blocks) + head == 2048 * (6 * 6_607_077_376 + 12 * 32 * 4096 * 2048)


def test_only_what_is_needed_counts(make_checkpoint: Callable[..., Path]) -> None:
    """Samples in a batch attend to themselves; the head is needed for supervised tokens; a window limits the keys."""
    model = ModelFlops(read_spec(make_checkpoint("llama")))
    long, two, short = (model.by_layer(lengths, 0)[1] for lengths in ([30], [10, 20], [10]))
    pair = (long - two) / (30**2 - 10**2 - 20**2)
    assert pair == 12 * 64  # heads x head_dim
    assert two - 20**2 * pair - short == 2 * (short - 10**2 * pair)  # 20 tokens and 10
    assert model.by_layer([30], 7)[-1] == 7 * model.by_layer([30], 1)[-1]
    assert model.by_layer([30], 7)[:-1] == model.by_layer([30], 0)[:-1]
    gemma = ModelFlops(read_spec(make_checkpoint("gemma2", sliding_window=8)))
    windowed, full = (gemma.by_layer([100], 0)[block] for block in (1, 2))
    assert full - windowed == pair * 100 * (100 - 8)


def test_of_the_experts_only_the_chosen_ones_count(make_checkpoint: Callable[..., Path]) -> None:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2}
    few = ModelFlops(read_spec(make_checkpoint("mixtral", **sizes)))
    more = ModelFlops(read_spec(make_checkpoint("mixtral", **sizes | {"num_experts_per_tok": 3})))
    found = zip(few.by_layer([1], 0), more.by_layer([1], 0), strict=True)
    assert [many - some for some, many in found] == [0, *[6 * (3 * 64 * 96)] * 3, 0]  # one expert more in each block
