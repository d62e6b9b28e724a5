"""Where the time of a step goes on a device: by kinds of kernels, by their names, from torch's profiler.

On a CPU, which has no kernels, operators stand for them, without those that they call. What is idle is the part of the
step in which no kernel runs; as kernels may overlap, the shares are of the time in which some kernel runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

REST = "norm and elementwise"
# The first that fits a name counts: attention kernels are built of products, optimizers of elementwise steps, and what
# torch.compile fuses bears the names of all that is in it.
CLASSES = (
    ("attention", r"flash|fmha|attention|attn|sdpa|flex"),
    (REST, r"^triton_(poi|red|per)_"),
    ("communication", r"nccl|gloo|c10d"),
    ("matrix products", r"gemm|gemv|cutlass|cublas|nvjet|xmma|matmul|^triton_tem_|^aten::(mm|addmm|bmm|baddbmm)$"),
    ("optimizer", r"adam|lion|multi_tensor|foreach|lpnorm"),
    ("copies", r"memcpy|memset|copy|catarray|^aten::cat$|fill"),
)
MOST_NAMED, NAME = 12, 120  # kernels that are named, and characters of a name


class Span(NamedTuple):
    """A kernel's run, in microseconds."""

    name: str
    begin: float
    end: float


def kind(name: str) -> str:
    """Return the class of a kernel."""
    return next((each for each, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), REST)


def shares(spans: Iterable[Span], seconds: float) -> dict[str, Any]:
    """Return the share of each class and of idleness in a step, and the kernels that take most.

    Args:
        seconds: of the step.
    """
    ordered = sorted(spans, key=lambda span: span.begin)
    by_class: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    busy, until = 0.0, float("-inf")
    for name, begin, end in ordered:
        by_class[kind(name)] += end - begin
        by_name[name[:NAME]] += end - begin
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    running = busy / 1e6 / seconds
    longest = _largest_first(by_name, running)
    return {
        "classes": _largest_first(by_class, running) | {"idle": 1 - running},
        "longest": {name: longest[name] for name in list(longest)[:MOST_NAMED]},
        "kernels": len(ordered),
    }


def _largest_first(times: Mapping[str, float], whole: float) -> dict[str, float]:
    """Times as shares that sum to `whole`."""
    total = sum(times.values())
    return {name: times[name] / total * whole for name in sorted(times, key=times.__getitem__, reverse=True)}


def spans_of(profiler: Any, on_gpu: bool) -> list[Span]:
    """Return what a finished profiler saw on the device."""
    from torch.autograd import DeviceType

    if on_gpu:
        seen = (event for event in profiler.events() if event.device_type == DeviceType.CUDA)
        kernels = (event for event in seen if not event.is_user_annotation)  # which spans kernels
        return [Span(event.name, event.time_range.start, event.time_range.end) for event in kernels]
    starts = ((event, event.time_range.start) for event in profiler.events())
    return [Span(event.name, start, start + event.self_cpu_time_total) for event, start in starts]
