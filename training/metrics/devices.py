"""What a device can do: memory, arithmetic, bandwidth.

A plan assumes that a run turns `EFFICIENCY` of the peak into model FLOPs while it computes; `--calibrate` measures
instead. Of the memory, `USABLE` may be planned with: drivers, CUDA and NCCL take some 0.5 to 1 GB, and the allocator
cannot use every hole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from training.errors import ConfigError

TERA = 1e12
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


class _Gpu(NamedTuple):
    """What a datasheet says.

    Attributes:
        pattern: a regular expression of torch's name of the device.
        half, single: TFLOP/s of dense matrix products in bf16 or fp16 with fp32 sums, and in fp32.
        sizes: GiB of memory.
        bandwidth: GB/s of memory.
    """

    pattern: str
    half: float
    single: float
    sizes: tuple[int, ...]
    bandwidth: float


# By the name in `--devices`; of those whose pattern fits, the first counts. From NVIDIA's datasheets
# (nvidia.com/en-us/data-center/h100 and so on), which mostly state twice the peak, for sparse matrices. GeForce and
# RTX: appendix A of the GA102 and the Ada whitepapers.
_KNOWN = {
    "B200": _Gpu("B200", 2250, 75, (180,), 8000),
    "GH200": _Gpu("GH200", 989, 67, (96, 144), 4000),
    "H200NVL": _Gpu("H200 NVL", 835, 60, (141,), 4800),
    "H100NVL": _Gpu("H100 NVL", 835, 60, (94,), 3938),
    "H100PCIe": _Gpu("H[18]00 PCIe", 756, 51, (80,), 2039),
    "H200": _Gpu("H200", 989, 67, (141,), 4800),
    "H100": _Gpu("H[18]00", 989, 67, (80,), 3350),
    "A100": _Gpu("A[18]00", 312, 19.5, (40, 80), 1555),
    "A40": _Gpu("A40", 149.7, 37.4, (48,), 696),
    "A30": _Gpu("A30", 165, 10.3, (24,), 933),
    "A10": _Gpu("A10", 125, 31.2, (24,), 600),
    "L40S": _Gpu("L40S", 362, 91.6, (48,), 864),
    "L40": _Gpu("L40", 181, 90.5, (48,), 864),
    "L4": _Gpu("L4", 121, 30.3, (24,), 300),
    "V100S": _Gpu("V100S", 130, 16.4, (32,), 1134),
    "V100PCIe": _Gpu("V100-PCIE", 112, 14, (16, 32), 900),
    "V100": _Gpu("V100", 125, 15.7, (16, 32), 900),
    "T4": _Gpu("T4", 65, 8.1, (16,), 320),
    "RTXA6000": _Gpu("RTX A6000", 154.8, 38.7, (48,), 768),
    "RTX6000Ada": _Gpu("RTX 6000 Ada Generation", 364.2, 91.1, (48,), 960),
    "RTX4090": _Gpu("RTX 4090$", 165.2, 82.6, (24,), 1008),
    "RTX3090": _Gpu("RTX 3090$", 71, 35.6, (24,), 936),
}


def _known(device_name: str) -> str | None:
    """The key of a GPU by torch's name of it; None for one that is not known, or a slice of one."""
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((key for key, gpu in _KNOWN.items() if re.search(rf"\b{gpu.pattern}(?!\w)", device_name)), None)


def peak_flops(device_name: str) -> float | None:
    """Dense half-precision FLOP/s of a GPU by torch's name of it; None for one that is not known, or a slice of one."""
    key = _known(device_name)
    return _KNOWN[key].half * TERA if key else None


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
    sizes = _KNOWN[known].sizes
    if size and int(size) not in sizes:
        raise ConfigError(f"--devices: {text!r}: {known} has {' or '.join(map(str, sizes))} GB")
    return int(count or 1), _device(known, int(size or sizes[0]))


def this_device() -> Device:
    """The device that this process would run on. Ask one rank and tell the others: machines may differ."""
    if not torch.cuda.is_available():
        return CPU
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    known = _known(name)
    near = [size for size in _KNOWN[known].sizes if 0.9 < memory / (size * GIB) <= 1.01] if known else []
    if known and near:
        return _device(known, near[0])
    half = peak_flops(name) or 1e14
    return Device(name, int(memory * USABLE), half, half / 8, 1e12, known=False)


def _device(name: str, gib: int) -> Device:
    gpu = _KNOWN[name]
    memory, bf16 = int(gib * GIB * USABLE), not name.startswith(("V100", "T4"))
    return Device(f"{name}-{gib}G", memory, gpu.half * TERA, gpu.single * TERA, gpu.bandwidth * 1e9, bf16=bf16)
