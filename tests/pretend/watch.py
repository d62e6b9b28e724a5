"""Sees every operation of torch and of its collectives, and notes what a GPU would refuse or make the host wait for."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tests.pretend.places import Place, place_of, put, tensors_of

aten: Any = torch.ops.aten
ROOT = f"{Path(__file__).parents[2]}/"
OWN = f"{Path(__file__).parent}/"
WAITING = {
    getattr(aten, name)
    for name in """_local_scalar_dense nonzero masked_select equal is_nonzero _unique _unique2 unique_dim
    unique_consecutive unique_dim_consecutive bincount allclose repeat_interleave segment_reduce""".split()
}
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
TAKES_NUMBERS = (aten.where, aten.masked_fill, aten.masked_fill_, aten.fill_)  # besides all pointwise operations


class Finding(NamedTuple):
    """What a GPU would not have taken as it was.

    Attributes:
        kind: "mismatch", an operation on tensors of two places; "refused", what NCCL does not take; "wait", of the
            host for the device.
        what: the operation.
        where: file and function of the product; behind ` > ` those of a library that it had called.
    """

    kind: str
    what: str
    where: str


class Thread(threading.local):
    """What a thread is at: others ask for numbers of their own meanwhile.

    Attributes:
        asked: what Python asked for.
        placing: how many are placing what is made.
        silent: how many want nothing noted.
    """

    asked = ""
    placing = silent = 0


class Watch(TorchDispatchMode):
    """`with Watch() as watch:`

    Attributes:
        found: how often each finding was made; to be cleared by whoever counts anew.
        lines: one line of code for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Finding] = Counter()
        self.lines: dict[Finding, int] = {}
        self._thread = Thread()

    def note(self, kind: str, what: str) -> None:
        if not self._thread.silent:
            where, line = _where()
            finding = Finding(kind, what, where)
            self.found[finding] += 1
            self.lines.setdefault(finding, line)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Note nothing: what happens inside is known, or is another thing on a GPU."""
        self._thread.silent += 1
        try:
            yield
        finally:
            self._thread.silent -= 1

    @contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Let waits inside go by the name of what Python asked for."""
        before, self._thread.asked = self._thread.asked, what
        try:
            yield
        finally:
            self._thread.asked = before

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Leave what is made inside to the caller, who knows where it lies."""
        self._thread.placing += 1
        try:
            yield
        finally:
            self._thread.placing -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **kwargs)
        if any(is_traceable_wrapper_subclass(leaf) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented  # the tensor asks for operations on those that it is made of
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode nobody has taken it apart
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        tensors = tensors_of((args, kwargs))
        places = [place_of(tensor) for tensor in tensors]
        touched = Place.DEVICE in places
        if func.namespace == "c10d":
            self._check_collective(func, tensors, places)
        elif touched:
            self._check_places(func, args, tensors, places)
            self._check_wait(func, args, kwargs)
        result = _computed(func, args, kwargs)
        if touched and func.overloadpacket is not aten.copy_:
            put(tensors_of(result), Place.DEVICE)
            put((t for t, place in zip(tensors, places, strict=True) if place is Place.UNKNOWN), Place.DEVICE)
        elif not self._thread.placing and all(place is Place.UNKNOWN for place in places):
            put(tensors_of(result), Place.UNKNOWN)
        return result

    def _check_collective(self, func: Any, tensors: list[Tensor], places: list[Place]) -> None:
        if "barrier" not in func._opname and any(place in (Place.HOST, Place.PINNED) for place in places):
            self.note("refused", f"{func._opname} of a CPU tensor")

    def _check_places(self, func: Any, args: Any, tensors: list[Tensor], places: list[Place]) -> None:
        packet = func.overloadpacket
        host = [t for t, place in zip(tensors, places, strict=True) if place in (Place.HOST, Place.PINNED)]
        if not host:
            return
        if packet is aten.copy_:
            non_blocking = len(args) > 2 and args[2]
            self.note_copy(place_of(args[1]), place_of(args[0]), non_blocking)
        elif packet in INDEXING and place_of(args[0]) is Place.DEVICE:
            if any(tensor.dim() for tensor in host):  # a number goes along with the launch
                self.note("wait", f"{packet._qualified_op_name.removeprefix('aten::')} by a CPU tensor")
        else:
            takes_numbers = torch.Tag.pointwise in func.tags or "foreach" in str(packet) or packet in TAKES_NUMBERS
            written = [a for a, slot in zip(args, func._schema.arguments, strict=False) if slot.is_write]
            if wrong := [t for t in host if t.dim() or not takes_numbers or any(t is each for each in written)]:
                shapes = ", ".join(str(list(tensor.shape)) for tensor in wrong)
                self.note("mismatch", f"{func} of a CPU tensor {shapes}")

    def note_copy(self, source: Place, target: Place, non_blocking: bool) -> None:
        """The host waits for a copy between the places unless it was asked not to and its own memory is pinned."""
        if not non_blocking or Place.HOST in (source, target):
            pageable = " of memory that is not pinned" if non_blocking else ""
            self.note("wait", f"copy from {source.value} to {target.value}{pageable}")

    def _check_wait(self, func: Any, args: Any, kwargs: Any) -> None:
        packet, name = func.overloadpacket, func._opname
        if packet in WAITING and kwargs.get("output_size") is None:
            self.note("wait", self._thread.asked or name)
        elif packet in INDEXING and any(isinstance(t, Tensor) and t.dtype is torch.bool for t in args[1]):
            filled = packet is not aten.index and args[2].numel() == 1  # becomes masked_fill
            if not filled:
                self.note("wait", f"{name} by a mask")


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result; what only a GPU has a kernel for is computed in another way."""
    if func is aten.mm.dtype:
        return torch.mm(args[0].to(args[2]), args[1].to(args[2]))
    if func is aten.addmm.dtype_out:
        total, left, right, dtype = args[:4]
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        product = torch.mm(left.to(dtype), right.to(dtype)) * alpha
        return kwargs["out"].copy_(product + total * beta if beta else product)
    if func is aten.histc.default and not args[0].is_floating_point():
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _where() -> tuple[str, int]:
    """File and function of the product that the operation comes from, and the line."""
    library, frame = "", sys._getframe(2)
    while frame.f_back is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if "site-packages/" in path:
            short = path.split("site-packages/")[1]
            inner = short.startswith(("torch/", "typing_extensions.py")) and not short.startswith("torch/optim/")
            if not library and not inner:
                library = f" > {short} {name}"
        elif path.startswith(ROOT) and not path.startswith(OWN):
            return f"{path.removeprefix(ROOT)} {name}{library}", frame.f_lineno
        frame = frame.f_back
    return f"tests{library}", 0
