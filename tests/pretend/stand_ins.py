"""Replace what Python asks of tensors by answers for where they pretend to be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tests.pretend.cuda import Stream
from tests.pretend.places import REAL_DEVICE, Place, is_ours, on_device, place_of, put, tensors_of, this_device
from tests.pretend.watch import Watch

FACTORIES = """empty zeros ones full rand randn randint randperm arange linspace eye tril_indices triu_indices
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like empty_strided""".split()
METHODS = "new_empty new_zeros new_ones new_full new_tensor".split()
READ_AT_ONCE = "tolist numpy __array__".split()  # these read memory without an operation
QUESTIONS = "item __bool__ __int__ __float__ __index__".split()


def patch_tensors(watch: Watch) -> None:
    """Let tensors answer by where they pretend to be."""

    def pinned(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        put([copy], Place.PINNED)
        return copy

    answers = {
        "device": property(lambda tensor: this_device() if on_device(tensor) else REAL_DEVICE(tensor)),
        "is_cuda": property(on_device),
        "is_cpu": property(lambda tensor: REAL_DEVICE(tensor).type == "cpu" and not on_device(tensor)),
        "get_device": lambda tensor: this_device().index if on_device(tensor) else -1,
        "to": _moving(watch, Tensor.to),
        "cuda": lambda tensor, device=None, non_blocking=False: tensor.to(this_device(), non_blocking=non_blocking),
        "cpu": lambda tensor: tensor.to("cpu"),
        "record_stream": lambda tensor, stream: None,
        "is_pinned": lambda tensor, *_: place_of(tensor) is Place.PINNED,
        "pin_memory": pinned,
        "type": _typed(Tensor.type),
    }
    for name, answer in answers.items():
        setattr(Tensor, name, answer)
    for name in READ_AT_ONCE:
        setattr(Tensor, name, _reading(watch, name, getattr(Tensor, name)))
    for name in QUESTIONS:
        setattr(Tensor, name, _asking(watch, name, getattr(Tensor, name)))
    for name in FACTORIES:
        setattr(torch, name, _making(watch, getattr(torch, name)))
    for name in METHODS:
        setattr(Tensor, name, _making(watch, getattr(Tensor, name)))
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _from_numbers(watch, getattr(torch, name)))
    wrap: Any = Tensor._make_wrapper_subclass

    def wrapped(kind: type[Tensor], size: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """A tensor made of others (fp8): torch asks a real device of its own to differentiate it."""
        real = torch.device("cpu") if device is not None and device.type == "cuda" else device
        return wrap(kind, size, *args, device=real, **kwargs)

    setattr(Tensor, "_make_wrapper_subclass", wrapped)  # noqa: B010
    set_item = Tensor.__setitem__

    def set_from_the_device(tensor: Tensor, index: Any, value: Any) -> None:
        """C++ makes a number a tensor of the same device."""
        if on_device(tensor) and isinstance(value, (bool, int, float)):
            value = torch.full((), value, dtype=tensor.dtype, device=this_device())
        set_item(tensor, index, value)

    setattr(Tensor, "__setitem__", set_from_the_device)  # noqa: B010
    by_device: Any = torch._C._group_tensors_by_device_and_dtype

    def grouped(tensors: list[Any], with_indices: bool = False) -> dict[Any, Any]:
        groups = by_device(tensors, with_indices)
        first = {kinds: next(each for each in lists[0][0] if each is not None) for kinds, lists in groups.items()}
        return {(first[kinds].device, kinds[1]): lists for kinds, lists in groups.items()}

    setattr(torch._C, "_group_tensors_by_device_and_dtype", grouped)  # noqa: B010
    one_hot = torch.nn.functional.one_hot

    def one_hot_of_known_width(tensor: Tensor, num_classes: int = -1) -> Tensor:
        with watch.silent() if num_classes > 0 else nullcontext():  # a CPU looks whether all indices are within
            return one_hot(tensor, num_classes)

    torch.nn.functional.one_hot = one_hot_of_known_width


def _asking(watch: Watch, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def ask(tensor: Tensor, *args: Any) -> Any:
        if on_device(tensor):
            Stream.wait_for_all()
        with watch.asked(name.strip("_")):
            return real(tensor, *args)

    return ask


def _reading(watch: Watch, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if on_device(tensor):
            Stream.wait_for_all()
            watch.note("wait" if name == "tolist" else "mismatch", name)
        with watch.silent():
            return real(tensor, *args, **kwargs)

    return read


def _typed(real: Callable[..., Any]) -> Callable[..., Any]:
    def of_type(tensor: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return real(tensor, dtype, **kwargs)
        return real(tensor).replace("torch.", "torch.cuda.") if on_device(tensor) else real(tensor)

    return of_type


def _device_of(device: Any) -> torch.device | None:
    """What a `device` argument means, or the context where there is none."""
    if device is None:
        modes = torch.overrides._get_current_function_mode_stack()
        device = next((mode.device for mode in reversed(modes) if hasattr(mode, "device")), None)
    return torch.device("cuda", device) if isinstance(device, int) else device and torch.device(device)


def _making(watch: Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor: of nothing, or like its first argument."""

    @wraps(real)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        like = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
        place = (like.device if device is None else None) if isinstance(like, Tensor) else None
        wanted = place or _device_of(device)
        if wanted is not None and wanted.type not in ("cpu", "cuda"):
            return real(*args, device=wanted, **kwargs)
        with watch.placing():
            made = real(*args, device="cpu", **kwargs)
        there = wanted is not None and wanted.type == "cuda"
        put(tensors_of(made), Place.DEVICE if there else Place.PINNED if pin_memory else Place.HOST)
        return made

    return make


def _from_numbers(watch: Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    """torch.tensor and torch.as_tensor: made on the host; on the device it takes a copy, which the host waits for."""

    @wraps(real)
    def make(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        wanted = _device_of(device)
        if isinstance(data, Tensor):
            made = real(data, *args, **kwargs) if is_ours(data) else real(data, *args, device=device, **kwargs)
            return made if wanted is None else made.to(wanted)
        if wanted is not None and wanted.type not in ("cpu", "cuda"):
            return real(data, *args, device=wanted, **kwargs)
        with watch.placing():
            made = real(data, *args, device="cpu", **kwargs)
        there = wanted is not None and wanted.type == "cuda"
        if there and made.numel():
            watch.note("wait", f"{real.__name__} of Python's numbers")
        put([made], Place.DEVICE if there else Place.PINNED if pin_memory else Place.HOST)
        return made

    return make


def _moving(watch: Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    def to(tensor: Tensor, *args: Any, copy: bool = False, memory_format: Any = None, **kwargs: Any) -> Tensor:
        rest = {} if memory_format is None else {"memory_format": memory_format}
        if not is_ours(tensor):
            return real(tensor, *args, copy=copy, **rest, **kwargs)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        elif args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        source = place_of(tensor)
        here = source is Place.DEVICE
        there = here if device is None else device.type == "cuda"
        dtype = dtype or tensor.dtype
        if device is not None and device.type not in ("cpu", "cuda"):
            return real(tensor, device=device, dtype=dtype, copy=copy, **rest)
        if here == there:
            return real(tensor, dtype=dtype, copy=copy, **rest)
        target = Place.DEVICE if there else Place.HOST
        watch.note_copy(source, target, non_blocking)
        with watch.placing():
            moved: Tensor = real(tensor, dtype=dtype, copy=True, **rest)
        put([moved], target)
        return moved

    return to
