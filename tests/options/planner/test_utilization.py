"""The peak of a device, the share of it that a run uses, and the peak memory of processes and stages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.api import read_spec
from models.flops import ModelFlops
from options.planner.utilization import Utilization
from tests.conftest import ROOT
from tests.launching import start
from training.launch.agent import free_port
from training.metrics.devices import peak_flops


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
        ("NVIDIA GeForce RTX 4090 D", 147.1),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A1000", None),
        ("Tesla T40", None),
        ("", None),
    ],
)
def test_the_peaks_of_known_devices_and_no_guess_for_others(device: str, tera: float | None) -> None:
    assert peak_flops(device) == (tera and tera * 1e12)


def test_utilization_is_a_share_of_all_devices_peak(make_checkpoint: Callable[..., Path]) -> None:
    spec = read_spec(make_checkpoint("llama"))
    needed = sum(ModelFlops(spec).by_layer([100, 50], 20))
    a100 = 8 * ["NVIDIA A100-SXM4-80GB"]
    for devices, peak in ((a100, 8 * 312e12), ([*a100, "NVIDIA A10"], 8 * 312e12 + 125e12)):
        mfu = Utilization(spec, torch.bfloat16, devices)([100, 50], 20, seconds=0.5)
        assert mfu == pytest.approx(needed / 0.5 / peak)
    assert Utilization(spec, torch.float32, a100)([100, 50], 20, seconds=0.5) is None
    assert Utilization(spec, torch.bfloat16, [*a100, "Some other device"])([100, 50], 20, seconds=0.5) is None


def test_a_cpu_has_no_utilization(make_checkpoint: Callable[..., Path]) -> None:
    spec = read_spec(make_checkpoint("llama"))
    assert Utilization(spec, torch.bfloat16, [""])([100], 20, seconds=0.5) is None


def test_peak_memory_is_this_processs_and_not_its_parents() -> None:
    """A small child of a large process is small; getrusage would say otherwise."""
    ballast = bytearray(600_000_000)
    ballast[::4096] = b"1" * len(ballast[::4096])
    code = "from training.metrics.peak_memory import peak_memory as p\n"
    code += "a = p(); b = b'1' * 100_000_000; del b; print(a, p())"
    stub = "import sys, types; t = sys.modules['torch'] = types.ModuleType('torch')\n"
    stub += "t.cuda = types.SimpleNamespace(is_initialized=lambda: False)\n"
    output = subprocess.run(
        [sys.executable, "-c", stub + code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    first, second = map(int, output.split())
    assert first < 100_000_000
    assert 90_000_000 < second - first < 120_000_000


RANK = """
import sys
from torch import distributed, ones
from training.metrics.peak_memory import peak_memory, peak_memory_by_stage
rank, port = map(int, sys.argv[1:])
distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
ones(40_000_000 * (rank + 1))  # four bytes each, freed at once
print(peak_memory(), *peak_memory_by_stage(stage=min(rank, 1), stages=2))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_all_ranks_get_the_peak_of_each_stages_largest_process() -> None:
    port = str(free_port())
    launches = [start(sys.executable, "-c", RANK, str(rank), port) for rank in range(3)]
    numbers = [list(map(int, launch.end().stdout.split())) for launch in launches]
    (first, *peaks), (second, *_), (third, *_) = numbers
    assert peaks[0] == pytest.approx(first, rel=0.02)
    assert peaks[1] == pytest.approx(max(second, third), rel=0.02)
    assert peaks[1] > peaks[0] + 200_000_000
    assert all(rest == peaks for _, *rest in numbers)
