"""Which device has which peak, and the share of it that a run uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.api import read_spec
from models.costs import ModelFlops
from training.metrics.devices import peak_flops
from training.metrics.utilization import Utilization


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
    spec = read_spec(make_checkpoint("llama"))
    needed = sum(ModelFlops(spec).by_layer([100, 50], 20))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    mfu = Utilization(spec, torch.bfloat16, processes=8)([100, 50], 20, seconds=0.5)
    assert mfu == pytest.approx(needed / 0.5 / (8 * 312e12))
    assert Utilization(spec, torch.float32, processes=8)([100, 50], 20, seconds=0.5) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some other device")
    assert Utilization(spec, torch.bfloat16, processes=8)([100, 50], 20, seconds=0.5) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_cpu_has_no_utilization(make_checkpoint: Callable[..., Path]) -> None:
    spec = read_spec(make_checkpoint("llama"))
    assert Utilization(spec, torch.bfloat16, processes=1)([100], 20, seconds=0.5) is None
