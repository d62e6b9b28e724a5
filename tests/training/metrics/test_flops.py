"""Model FLOPs against torch's own counter, and which device has which peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from models.spec import ModelSpec
from training.metrics import flops
from training.metrics.devices import peak_flops
from training.metrics.flops import ModelFlops, Utilization

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
    found = sum(ModelFlops(ModelSpec.from_folder(folder)).by_layer([LENGTH] * BATCH, BATCH * LENGTH))
    assert found == pytest.approx(counted(folder), rel=0.02)


def test_a_known_model_by_hand(tmp_path: Path) -> None:
    """Llama-7B, whose blocks have 6,476,005,376 weights in matrices and whose head has 131,072,000."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, '
        '"num_attention_heads": 32, "vocab_size": 32000}'
    )
    embedding, *blocks, head = ModelFlops(ModelSpec.from_folder(tmp_path)).by_layer([2048], 2048)
    assert embedding == 0
    assert head == 2048 * 6 * 32000 * 4096
    assert blocks == [2048 * (6 * (4 * 4096**2 + 3 * 4096 * 11008) + 12 * 4096 * 2048)] * 32
    assert sum(blocks) + head == 2048 * (6 * 6_607_077_376 + 12 * 32 * 4096 * 2048)


def test_only_what_is_needed_counts(make_checkpoint: Callable[..., Path]) -> None:
    """Samples in a batch attend to themselves; the head is needed for supervised tokens; a window limits the keys."""
    model = ModelFlops(ModelSpec.from_folder(make_checkpoint("llama")))
    long, two, short = (model.by_layer(lengths, 0)[1] for lengths in ([30], [10, 20], [10]))
    pair = (long - two) / (30**2 - 10**2 - 20**2)
    assert pair == 12 * 64  # heads x head_dim
    assert two - 20**2 * pair - short == 2 * (short - 10**2 * pair)  # 20 tokens and 10
    assert model.by_layer([30], 7)[-1] == 7 * model.by_layer([30], 1)[-1]
    assert model.by_layer([30], 7)[:-1] == model.by_layer([30], 0)[:-1]
    gemma = ModelFlops(ModelSpec.from_folder(make_checkpoint("gemma2", sliding_window=8)))
    windowed, full = (gemma.by_layer([100], 0)[block] for block in (1, 2))
    assert full - windowed == pair * 100 * (100 - 8)


def test_of_the_experts_only_the_chosen_ones_count(make_checkpoint: Callable[..., Path]) -> None:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2}
    few = ModelFlops(ModelSpec.from_folder(make_checkpoint("mixtral", **sizes)))
    more = ModelFlops(ModelSpec.from_folder(make_checkpoint("mixtral", **sizes | {"num_experts_per_tok": 3})))
    found = zip(few.by_layer([1], 0), more.by_layer([1], 0), strict=True)
    assert [many - some for some, many in found] == [0, *[6 * (3 * 64 * 96)] * 3, 0]  # one expert more in each block


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla V100S-PCIE-32GB", 130),
        ("Tesla T4", 65),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_the_peaks_of_known_devices(device: str, tera: float) -> None:
    assert peak_flops(device) == tera * 1e12


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A10G",
        "NVIDIA A1000",
        "Tesla T40",
        "",
    ],
)
def test_no_guess_for_other_devices(device: str) -> None:
    assert peak_flops(device) is None


def test_utilization_is_a_share_of_all_devices_peak(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec.from_folder(make_checkpoint("llama"))
    needed = sum(ModelFlops(spec).by_layer([100, 50], 20))
    monkeypatch.setattr(flops.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    mfu = Utilization(spec, torch.bfloat16, processes=8)([100, 50], 20, seconds=0.5)
    assert mfu == pytest.approx(needed / 0.5 / (8 * 312e12))
    assert Utilization(spec, torch.float32, processes=8)([100, 50], 20, seconds=0.5) is None
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda: "Some other device")
    assert Utilization(spec, torch.bfloat16, processes=8)([100, 50], 20, seconds=0.5) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_cpu_has_no_utilization(make_checkpoint: Callable[..., Path]) -> None:
    spec = ModelSpec.from_folder(make_checkpoint("llama"))
    assert Utilization(spec, torch.bfloat16, processes=1)([100], 20, seconds=0.5) is None
