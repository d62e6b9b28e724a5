"""What a device can do: memory, arithmetic, bandwidth.

Figures of memory and bandwidth are those of NVIDIA's datasheets; half-precision peaks are in `training.metrics.flops`.
A plan assumes that a run turns `EFFICIENCY` of the peak into model FLOPs while it computes; `--calibrate` measures
instead. Of the memory, `USABLE` may be planned with: drivers, CUDA and NCCL take some 0.5 to 1 GB, and the allocator
cannot use every hole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from training.errors import ConfigError
from training.metrics.flops import TERA, peak_flops

EFFICIENCY = 0.5
USABLE = 0.96
GIB = 2**30
LINK = 20e9  # bytes/s between neighbours: PCIe 4 x16; NVLink is faster, and hidden states are small either way


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process on a CPU.

    Attributes:
        name: as in `--devices`.
        memory: bytes that may be planned with; None where nothing is known to limit them.
        half, single: FLOP/s at best, in 16-bit numbers with fp32 sums and in fp32.
        bandwidth: of its memory, in bytes/s.
        efficiency: the share of the peak that a run gets.
        link: bytes/s to a neighbour.
        reserves: whether freshly allocated memory counts before it is written to (CUDA), or only then (a CPU).
        known: whether speeds in seconds may be told.
        bf16: whether it computes in bf16.
    """

    name: str
    memory: int | None
    half: float
    single: float
    bandwidth: float
    efficiency: float = EFFICIENCY
    link: float = LINK
    reserves: bool = True
    known: bool = True
    bf16: bool = True

    def flops(self, dtype: torch.dtype) -> float:
        """FLOP/s that a run in `dtype` can expect."""
        return self.efficiency * (self.single if dtype == torch.float32 else self.half)


# A core of a desktop or a server; only the ratio of arithmetic to memory matters, for the division of layers.
CPU = Device("CPU", None, 1e11, 5e10, 1e10, 1.0, 1e9, reserves=False, known=False)

# Name: torch's name for the lookup of the peak, GiB of each size, TFLOP/s in fp32, GB/s of memory.
_KNOWN: dict[str, tuple[str, tuple[int, ...], float, float]] = {
    "V100": ("V100-SXM2", (16, 32), 15.7, 900),
    "A100": ("A100-SXM4", (40, 80), 19.5, 1555),
    "H100": ("H100", (80,), 67, 3350),
    "H200": ("H200", (141,), 67, 4800),
    "B200": ("B200", (180,), 75, 8000),
    "A10": ("A10", (24,), 31.2, 600),
    "A30": ("A30", (24,), 10.3, 933),
    "A40": ("A40", (48,), 37.4, 696),
    "L4": ("L4", (24,), 30.3, 300),
    "L40S": ("L40S", (48,), 91.6, 864),
    "T4": ("T4", (16,), 8.1, 320),
    "RTX3090": ("RTX 3090", (24,), 35.6, 936),
    "RTX4090": ("RTX 4090", (24,), 82.6, 1008),
}


def parse_devices(text: str) -> tuple[int, Device]:
    """How many of which device: `8xA100-40G`, `H200`.

    Raises:
        ConfigError: another form, or a device that is not known.
    """
    match = re.fullmatch(r"(?:(\d+)x)?([A-Za-z]+\w*?)(?:-(\d+)G?B?)?", text.replace(" ", ""), re.IGNORECASE)
    names = ", ".join(_KNOWN)
    if not match:
        raise ConfigError(f"--devices: {text!r}: expected a number and a device such as 8xA100-40G")
    count, name, size = match.groups()
    known = next((key for key in _KNOWN if key.lower() == name.lower()), None)
    if known is None or int(count or 1) < 1:
        raise ConfigError(f"--devices: {text!r} is not known; expected at least one of {names}")
    sizes = _KNOWN[known][1]
    if size and int(size) not in sizes:
        raise ConfigError(f"--devices: {text!r}: {known} has {' or '.join(map(str, sizes))} GB")
    return int(count or 1), _device(known, int(size or sizes[0]))


def this_device() -> Device:
    """The device that this process would run on. Ask one rank and tell the others: machines may differ."""
    if not torch.cuda.is_available():
        return CPU
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    for known, (pattern, sizes, _, _) in _KNOWN.items():
        near = [size for size in sizes if 0.9 < memory / (size * GIB) <= 1.01]
        if near and re.search(rf"\b{re.escape(pattern.split('-')[0])}\b", name):
            return _device(known, near[0])
    half = peak_flops(name) or 1e14
    return Device(name, int(memory * USABLE), half, half / 8, 1e12, known=False)


def _device(name: str, gib: int) -> Device:
    pattern, _, single, bandwidth = _KNOWN[name]
    half = peak_flops(pattern)
    assert half is not None, "every device of the table has a peak"
    bf16 = name not in ("V100", "T4")
    return Device(f"{name}-{gib}G", int(gib * GIB * USABLE), half, single * TERA, bandwidth * 1e9, bf16=bf16)
