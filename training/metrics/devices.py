"""The devices' memory, arithmetic and bandwidth.

Plans use the share `USABLE` of the memory: drivers, CUDA and NCCL take some 0.5 to 1 GB, and the allocator cannot use
every hole. gpus.yml has numbers from datasheets and public measurements; a run sustains the same share of them on all
GPUs.

Devices of several kinds in one run are one `Device` too, which has those of all processes: its own numbers are those of
the weakest, and hold wherever nobody asks for the single ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain, groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.quantities import GIGA
from training.errors import ConfigError

if TYPE_CHECKING:
    import torch

TERA = 1e12
USABLE = 0.96
GIB = 2**30
BEST = 0.8  # share of the peak for GPUs whose fastest product was not measured: the median of the others
SUSTAINED = 0.9  # share of the fastest burst at the power limit: 722 of 795 TFLOP/s on an H200 (ml-engineering)
STREAMED = 0.9  # share of the memory bandwidth in copy kernels (github.com/calculon-ai/calculon, a100_80g)
LINKED = 0.84  # share of a link: 380 of 450 GB/s on an H100 (github.com/NVIDIA/nccl, issue 1264)
PCIE = 25.0  # GB/s of PCIe 4 x16, after its own headers
HOST_LINK = LINKED * PCIE * GIGA  # bytes/s between a GPU and main memory
OWN = "8x{tflops: 119, memory_gib: 24, bandwidth_gb_s: 864, link_gb_s: 25}"  # a GPU by its numbers
SINGLE = 1 / 8  # speed in fp32, of that in 16 bits, where nothing is known


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process on a CPU.

    Attributes:
        name: as in `--devices`.
        memory: usable bytes; None if no limit is known.
        half, single: peak FLOP/s in 16-bit numbers with fp32 sums, and in fp32.
        fp8: peak FLOP/s in 8-bit numbers; 0 without support.
        bandwidth: sustained bytes/s of its memory.
        products: share of the peak FLOP/s that large products reach.
        attention: speed of attention kernels with long documents, relative to large products.
        half_length: document length, in tokens, at which causal attention reaches half of that.
        cores: number of cores, each of which computes a tile of a product.
        link: sustained bytes/s to a neighbour.
        kernel: seconds of overhead per kernel on the device.
        launch: seconds of the host per kernel launch; the host works ahead of the device.
        reserves: whether allocated memory counts before it is written to (CUDA; on a CPU it does not).
        known: whether plans may state speeds in seconds.
        bf16: whether it computes in bf16.
        each: the device of each process, by rank, where they are of several kinds; the numbers are the weakest's then.
    """

    name: str
    memory: int | None
    half: float
    single: float
    bandwidth: float
    products: float = BEST * SUSTAINED
    attention: float = 0.75
    # Flash kernels without a mask reach 0.69 of their speed at 16,384 tokens with 512, so causal ones do with 1,024
    # (github.com/pytorch/benchmark, 2391).
    half_length: float = 512.0
    cores: int = 100
    link: float = HOST_LINK
    kernel: float = 2e-6  # the rates of small and large copies differ by so much (calculon's a100_80g again)
    launch: float = 8e-6  # Python, autograd and the driver; published numbers are 5 to 20 microseconds
    reserves: bool = True
    known: bool = True
    bf16: bool = True
    fp8: float = 0.0
    each: tuple[Device, ...] = ()

    @property
    def kinds(self) -> list[Device]:
        """List the different devices, of which there is mostly one."""
        return list(dict.fromkeys(self.each)) or [self]

    def of(self, ranks: Sequence[int]) -> Device:
        """Return the device, or the devices, of these processes."""
        return mixed([self.each[rank] for rank in ranks]) if self.each else self

    def counted(self, number: int) -> str:
        """Say how many devices of which kinds these are, as `--devices` takes it."""
        return self.name if self.each else f"{number} x {self.name}"

    @property
    def ampere(self) -> bool:
        """Return whether it is an Ampere or later GPU, the first with bf16."""
        return self.reserves and self.bf16

    def flops(self, dtype: torch.dtype) -> float:
        """Return the peak FLOP/s in `dtype`."""
        return self.single if dtype.itemsize == 4 else self.half


# One CPU core; only the ratio of arithmetic to memory matters, for the division of layers.
CPU = Device(
    "CPU", None, 1e11, 5e10, 1e10, 1.0, 1.0, 0.0, cores=1, link=1e9, kernel=0, launch=0, reserves=False, known=False
)
KNOWN: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("gpus.yml").read_text(encoding="utf-8"))
SIZED = list[tuple[str, int]](chain.from_iterable(product([name], gpu["memory"]) for name, gpu in KNOWN.items()))
NEAREST = 5  # names that a message has


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's dense half-precision FLOP/s, given torch's name; None if unknown or a MIG slice."""
    key = _find_gpu(device_name)
    return KNOWN[key]["half"] * TERA if key else None


def mixed(devices: Sequence[Device]) -> Device:
    """Join the devices of a run's processes, by rank, to one; that itself where all are alike."""
    if len(set(devices)) == 1:
        return devices[0]
    slowest = min(devices, key=lambda device: device.half * device.products)
    return replace(
        slowest,
        name=",".join(f"{len(list(alike))}x{name}" for name, alike in groupby(device.name for device in devices)),
        memory=min((device.memory for device in devices), key=lambda memory: memory or math.inf),
        link=min(device.link for device in devices),
        known=all(device.known for device in devices),
        bf16=all(device.bf16 for device in devices),
        fp8=min(device.fp8 for device in devices),
        each=tuple(devices),
    )


def parse_devices(text: str) -> tuple[int, Device]:
    """Parse numbers of devices in the order of the ranks, `4xRTX4090,4xRTX3090`; see `_parse_kind`.

    Raises:
        ConfigError: a device is unknown, or comes in several sizes and none is given.
    """
    kinds = list(map(_parse_kind, re.split(r",(?![^{]*\})", text)))
    if len(kinds) == 1:
        return kinds[0]
    devices: list[Device] = []
    for count, device in kinds:
        devices += count * [device]
    return len(devices), mixed(devices)


def _parse_kind(text: str) -> tuple[int, Device]:
    """Parse a number of devices of one kind: `8xA100-40G`, `H200`, `4x4090`, or a GPU by its numbers as in `OWN`.

    The numbers are TFLOP/s of dense products in bf16 with fp32 sums, GiB of memory, GB/s of it, and GB/s to a neighbour
    in one direction, which may be left out (`PCIE`).

    Raises:
        ConfigError: the device is unknown, or comes in several sizes and none is given.
    """
    if own := re.fullmatch(r"\s*(?:([1-9]\d*)\s*x)?\s*(\{.*)", text, re.IGNORECASE):
        return int(own[1] or 1), _own_device(own[2], text)

    plain = "".join(text.split())
    count, word = re.findall(r"^(?:(\d+)x)?(.*)", plain, re.IGNORECASE)[0]
    number, found = int(count or 1), _named(word)
    if len(found) == 1 and number:
        return number, _device(*found[0])

    turned = re.fullmatch(r"(.+)x(\d+)", plain, re.IGNORECASE)
    if turned and (named := _named(turned[1])):
        names = [_label(*sized) if len(named) > 1 else sized[0] for sized in named]
        spelled = " or ".join(f"{turned[2]}x{name}" for name in names)
        raise ConfigError(f"--devices: {text!r}: expected the number first, {spelled}")

    longer = [sized for sized in SIZED if _normalize(word).startswith(_spellings(*sized)[1:])]
    near = [_label(*sized) for sized in found or longer]
    near = near or get_close_matches(word.upper(), [_label(*sized) for sized in SIZED], NEAREST)
    expected = f"one of {', '.join(near)}, such as 8x{near[0]}" if near else "a name that --help lists, such as 8xH100"
    numbers = "" if found else f"; or the numbers of another GPU, such as '{OWN}'"
    raise ConfigError(f"--devices: {text!r}: expected a number and {expected}{numbers}")


def _label(name: str, gib: int) -> str:
    return f"{name}-{gib}G"


def _spellings(name: str, gib: int) -> tuple[str, ...]:
    """Return what a device may be called: with its size, without it, and without RTX."""
    return _normalize(_label(name, gib)), _normalize(name), _normalize(name).removeprefix("rtx")


def _named(word: str) -> list[tuple[str, int]]:
    """Find the devices that a word names: one of each size where it leaves the size out."""
    return [sized for sized in SIZED if _normalize(word) in _spellings(*sized)]


def _own_device(numbers: str, text: str) -> Device:
    """Make a device of its numbers, as in `OWN`; `text` is the whole option."""
    try:
        given = yaml.safe_load(numbers)
    except yaml.YAMLError:
        given = None
    given = {"link_gb_s": PCIE} | given if isinstance(given, dict) else {}
    wanted = ("tflops", "memory_gib", "bandwidth_gb_s", "link_gb_s")
    usable = [type(number) in (int, float) and 0 < number < math.inf for number in given.values()]
    if set(given) != set(wanted) or not all(usable):
        raise ConfigError(f"--devices: {text!r}: expected numbers above 0, such as {OWN}")

    tflops, gib, bandwidth, link = (given[name] for name in wanted)
    return Device(
        f"GPU-{gib:g}G",
        int(gib * GIB * USABLE),
        half=tflops * TERA,
        single=tflops * TERA * SINGLE,
        bandwidth=STREAMED * bandwidth * GIGA,
        link=LINKED * link * GIGA,
        fp8=2 * tflops * TERA,  # as of every GPU in gpus.yml that has it
    )


def _normalize(word: str) -> str:
    """Strip a device name of common additions: `Tesla V100-SXM2-32GB` -> `v10032`."""
    return re.sub(r"[^a-z0-9]|sxm\d?|nvidia|tesla|geforce|(?<=\d)gi?b?$", "", word.lower())


def cpu_has_bf16() -> bool:
    """Return whether oneDNN has kernels for bf16 on this CPU."""
    import torch

    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def devices_here(processes: int | None = None) -> Device:
    """Return the devices of this machine; those of its first processes, if it has as many."""
    import torch

    gpus = torch.cuda.device_count()
    ranks = range(gpus if processes is None else processes)
    return mixed(list(map(this_device, ranks))) if 0 < len(ranks) <= gpus else this_device()


def this_device(number: int | None = None) -> Device:
    """Return the device of this process, or a GPU of this machine; machines may differ, so ask every rank."""
    import torch  # takes seconds; the command line is checked before

    if not torch.cuda.is_available():
        return CPU
    own = torch.cuda.get_device_properties(torch.cuda.current_device() if number is None else number)
    name, memory = own.name, own.total_memory
    known = _find_gpu(name)
    near = [size for size in KNOWN[known]["memory"] if 0.9 < memory / (size * GIB) <= 1.01] if known else []
    if known and near:
        return _device(known, near[0])
    half = peak_flops(name) or 1e14
    return Device(name, int(memory * USABLE), half, half * SINGLE, 1e12, known=False)


def _find_gpu(device_name: str) -> str | None:
    """Find the key of a GPU in gpus.yml."""
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((key for key, gpu in KNOWN.items() if re.search(rf"\b{gpu['pattern']}(?!\w)", device_name)), None)


def _device(name: str, gib: int) -> Device:
    gpu = KNOWN[name]
    return Device(
        _label(name, gib),
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
