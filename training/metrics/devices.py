"""What a device can do: memory, arithmetic, bandwidth.

Of the memory, `USABLE` may be planned with: drivers, CUDA and NCCL take some 0.5 to 1 GB, and the allocator cannot use
every hole. What datasheets say of GPUs stands in gpus.yml.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from training.errors import ConfigError

TERA = 1e12
USABLE = 0.96
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process on a CPU.

    Attributes:
        name: as in `--devices`.
        memory: bytes that may be planned with; None where nothing is known to limit them.
        half, single: FLOP/s at best, in 16-bit numbers with fp32 sums and in fp32.
        bandwidth: of its memory, in bytes/s.
        efficiency: the share of the peak that a run gets while it computes; an assumption that `--calibrate` replaces.
        link: bytes/s to a neighbour: PCIe 4 x16; NVLink is faster, and hidden states are small either way.
        reserves: whether freshly allocated memory counts before it is written to (CUDA), or only then (a CPU).
        known: whether speeds in seconds may be told.
        bf16: whether it computes in bf16.
    """

    name: str
    memory: int | None
    half: float
    single: float
    bandwidth: float
    efficiency: float = 0.5
    link: float = 20e9
    reserves: bool = True
    known: bool = True
    bf16: bool = True

    @property
    def ampere(self) -> bool:
        """Whether it is a GPU from Ampere on, the first that compute in bf16."""
        return self.reserves and self.bf16

    def flops(self, dtype: torch.dtype) -> float:
        """FLOP/s that a run in `dtype` can expect."""
        return self.efficiency * (self.single if dtype == torch.float32 else self.half)


# A core of a desktop or a server; only the ratio of arithmetic to memory matters, for the division of layers.
CPU = Device("CPU", None, 1e11, 5e10, 1e10, 1.0, 1e9, reserves=False, known=False)
_GPUS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("gpus.yml").read_text(encoding="utf-8"))


def peak_flops(device_name: str) -> float | None:
    """Dense half-precision FLOP/s of a GPU by torch's name of it; None for one that is not known, or a slice of one."""
    key = _known(device_name)
    return _GPUS[key]["half"] * TERA if key else None


def parse_devices(text: str) -> tuple[int, Device]:
    """How many of which device: `8xA100-40G`, `H200`.

    Raises:
        ConfigError: another form, or a device that is not known.
    """
    match = re.fullmatch(r"(?:(\d+)x)?([A-Za-z]+\w*?)(?:-(\d+)G?B?)?", text.replace(" ", ""), re.IGNORECASE)
    if not match:
        raise ConfigError(f"--devices: {text!r}: expected a number and a device such as 8xA100-40G")
    count, name, size = match.groups()
    known = next((key for key in _GPUS if key.lower() == name.lower()), None)
    if known is None or int(count or 1) < 1:
        raise ConfigError(f"--devices: {text!r} is not known; expected at least one of {', '.join(_GPUS)}")
    sizes = _GPUS[known]["sizes"]
    if size and int(size) not in sizes:
        raise ConfigError(f"--devices: {text!r}: {known} has {' or '.join(map(str, sizes))} GB")
    return int(count or 1), _device(known, int(size or sizes[0]))


def this_device() -> Device:
    """The device that this process would run on. Ask one rank and tell the others: machines may differ."""
    if not torch.cuda.is_available():
        return CPU
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    known = _known(name)
    near = [size for size in _GPUS[known]["sizes"] if 0.9 < memory / (size * GIB) <= 1.01] if known else []
    if known and near:
        return _device(known, near[0])
    half = peak_flops(name) or 1e14
    return Device(name, int(memory * USABLE), half, half / 8, 1e12, known=False)


def _known(device_name: str) -> str | None:
    """The key of a GPU, as `peak_flops` has it."""
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((key for key, gpu in _GPUS.items() if re.search(rf"\b{gpu['pattern']}(?!\w)", device_name)), None)


def _device(name: str, gib: int) -> Device:
    gpu = _GPUS[name]
    memory, bf16 = int(gib * GIB * USABLE), gpu.get("bf16", True)
    return Device(f"{name}-{gib}G", memory, gpu["half"] * TERA, gpu["single"] * TERA, gpu["bandwidth"] * 1e9, bf16=bf16)
