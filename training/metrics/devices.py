"""What a device can do: memory, arithmetic, bandwidth.

Of the memory, `USABLE` may be planned with: drivers, CUDA and NCCL take some 0.5 to 1 GB, and the allocator cannot use
every hole. What datasheets and public measurements say of GPUs stands in gpus.yml; what a run gets of it, hour after
hour, is the same share for all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from training.errors import ConfigError

if TYPE_CHECKING:
    import torch

GIGA, TERA = 1e9, 1e12
USABLE = 0.96
GIB = 2**30
BEST = 0.8  # of the peak, where the fastest product of a GPU was not measured: the middle of the others
SUSTAINED = 0.9  # of the fastest product in a burst, at the power limit: 722 of 795 TFLOP/s on an H200 (ml-engineering)
STREAMED = 0.9  # of the memory's bandwidth, in kernels that only move data (github.com/calculon-ai/calculon, a100_80g)
LINKED = 0.84  # of a link: 380 of 450 GB/s on an H100 (github.com/NVIDIA/nccl, issue 1264)
PCIE = 25.0  # GB/s of PCIe 4 x16, after its own headers
HOST_LINK = LINKED * PCIE * GIGA  # bytes/s between a GPU and main memory


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process on a CPU.

    Attributes:
        name: as in `--devices`.
        memory: bytes that may be planned with; None where nothing is known to limit them.
        half, single: FLOP/s at best, in 16-bit numbers with fp32 sums and in fp32.
        fp8: likewise, in 8-bit numbers; 0 where it does not compute in them.
        bandwidth: of its memory, in bytes/s, as a run gets it.
        products: the share of the FLOP/s at best that large products get.
        attention: what attention kernels get with long documents, of what large products get.
        half_length: tokens of a document at which causal attention gets half of that.
        cores: that compute a tile of a product each.
        link: bytes/s to a neighbour, as a run gets it.
        kernel: seconds that a kernel takes besides, to begin and to end.
        launch: seconds that the host takes to launch one; it works ahead of the device.
        reserves: whether freshly allocated memory counts before it is written to (CUDA), or only then (a CPU).
        known: whether speeds in seconds may be told.
        bf16: whether it computes in bf16.
    """

    name: str
    memory: int | None
    half: float
    single: float
    bandwidth: float
    products: float = BEST * SUSTAINED
    attention: float = 0.75
    # Flash kernels without a mask get 0.69 at 512 tokens of what they get at 16,384, and so at twice as many with one
    # (github.com/pytorch/benchmark, 2391).
    half_length: float = 512.0
    cores: int = 100
    link: float = HOST_LINK
    kernel: float = 2e-6  # the rates of small and large copies differ by so much (calculon's a100_80g again)
    launch: float = 8e-6  # of Python, autograd and the driver; 5 to 20 are told
    reserves: bool = True
    known: bool = True
    bf16: bool = True
    fp8: float = 0.0

    @property
    def ampere(self) -> bool:
        """Whether it is a GPU from Ampere on, the first that compute in bf16."""
        return self.reserves and self.bf16

    def flops(self, dtype: torch.dtype) -> float:
        """FLOP/s at best in `dtype`."""
        return self.single if dtype.itemsize == 4 else self.half


# A core of a desktop or a server; only the ratio of arithmetic to memory matters, for the division of layers.
CPU = Device(
    "CPU", None, 1e11, 5e10, 1e10, 1.0, 1.0, 0.0, cores=1, link=1e9, kernel=0, launch=0, reserves=False, known=False
)
KNOWN: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("gpus.yml").read_text(encoding="utf-8"))


def peak_flops(device_name: str) -> float | None:
    """Dense half-precision FLOP/s of a GPU by torch's name of it; None for one that is not known, or a slice of one."""
    key = _known(device_name)
    return KNOWN[key]["half"] * TERA if key else None


def parse_devices(text: str) -> tuple[int, Device]:
    """Read how many of which device: `8xA100-40G`, `H200`, `4x4090`.

    Raises:
        ConfigError: a device that is not known, or one of several sizes without its size.
    """
    count, word = re.findall(r"^(?:(\d+)x)?(.*)", "".join(text.split()), re.IGNORECASE)[0]
    labels = {f"{name}-{size}G": (name, size) for name, gpu in KNOWN.items() for size in gpu["memory"]}
    asked, number = _plain(word), int(count or 1)
    known = {
        label: (_plain(label), _plain(name), _plain(name).removeprefix("rtx")) for label, (name, _) in labels.items()
    }
    found = [label for label, names in known.items() if asked in names]
    if len(found) == 1 and number:
        return number, _device(*labels[found[0]])
    near = found or [label for label, names in known.items() if asked.startswith(names[1:])]
    near = near or get_close_matches(word.upper(), labels) or list(labels)
    raise ConfigError(f"--devices: {text!r}: expected a number and one of {', '.join(near)}, such as 8x{near[0]}")


def _plain(word: str) -> str:
    """A device's name without what people add to it: `Tesla V100-SXM2-32GB` -> `v10032`."""
    return re.sub(r"[^a-z0-9]|sxm\d?|nvidia|tesla|geforce|(?<=\d)gi?b?$", "", word.lower())


def this_device() -> Device:
    """The device that this process would run on. Ask one rank and tell the others: machines may differ."""
    import torch  # takes seconds, and a command line is read before

    if not torch.cuda.is_available():
        return CPU
    own = torch.cuda.get_device_properties(torch.cuda.current_device())
    name, memory = own.name, own.total_memory
    known = _known(name)
    near = [size for size in KNOWN[known]["memory"] if 0.9 < memory / (size * GIB) <= 1.01] if known else []
    if known and near:
        return _device(known, near[0])
    half = peak_flops(name) or 1e14
    return Device(name, int(memory * USABLE), half, half / 8, 1e12, known=False)


def _known(device_name: str) -> str | None:
    """The key of a GPU, as `peak_flops` has it."""
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((key for key, gpu in KNOWN.items() if re.search(rf"\b{gpu['pattern']}(?!\w)", device_name)), None)


def _device(name: str, gib: int) -> Device:
    gpu = KNOWN[name]
    return Device(
        f"{name}-{gib}G",
        int(gib * GIB * USABLE),
        half=gpu["half"] * TERA,
        single=gpu["single"] * TERA,
        bandwidth=STREAMED * gpu["memory"][gib] * GIGA,
        products=SUSTAINED * gpu.get("best", BEST * gpu["half"]) / gpu["half"],
        attention=gpu.get("flash", Device.attention),
        cores=gpu["cores"],
        link=LINKED * gpu.get("link", PCIE) * GIGA,
        bf16=gpu.get("bf16", True),
        fp8=gpu.get("fp8", 0.0) * TERA,
    )
