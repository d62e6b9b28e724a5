"""Where the memory of each tensor lies, as far as the pretence goes: every tensor is really a CPU's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

REAL_DEVICE: Callable[[Tensor], torch.device] = Tensor.device.__get__


class Place(Enum):
    """Of a piece of memory. UNKNOWN is what torch's own C++ made out of nothing, where a GPU's neighbours would be."""

    HOST = "host"
    PINNED = "pinned host"
    DEVICE = "device"
    UNKNOWN = "unknown"


_places: dict[int, tuple[StorageWeakRef, Place]] = {}  # the weak reference keeps an address from being used again
registered: dict[int, int] = {}  # address -> bytes of memory of the host that CUDA was told to lock
MOST = 100_000  # entries before those of freed memory are dropped


def this_device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def is_ours(value: object) -> bool:
    """Return whether this is a tensor with memory, of the one kind of device that the process really has."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or is_traceable_wrapper_subclass(value):
        return False
    return value.layout == torch.strided and REAL_DEVICE(value).type == "cpu"


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in nested arguments that take part in the pretence."""
    return [leaf for leaf in tree_leaves(values) if is_ours(leaf)]


def place_of(tensor: Tensor) -> Place:
    memory = _memory(tensor)
    entry = _places.get(memory._cdata)
    at = memory.data_ptr()
    locked = any(begin <= at < begin + size for begin, size in registered.items())
    return entry[1] if entry else Place.PINNED if locked else Place.HOST


def on_device(tensor: Tensor) -> bool:
    """Return whether a tensor lies on the device; one that is made of others lies where they do."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return any(on_device(getattr(tensor, name)) for name in names)
    return is_ours(tensor) and place_of(tensor) is Place.DEVICE


def put(tensors: Iterable[Tensor], place: Place) -> None:
    """Say where the memory of these tensors lies."""
    for memory in map(_memory, tensors):
        _places[memory._cdata] = StorageWeakRef(memory), place
    if len(_places) > MOST:
        for address in [address for address, (reference, _) in _places.items() if reference.expired()]:
            del _places[address]


def _memory(tensor: Tensor) -> Any:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside of vmap
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()
