"""torch.cuda as this process knows it, with one GPU, and collectives that NCCL seems to carry."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.pretend.places import registered, this_device
from tests.pretend.watch import Watch

GIGABYTES = 80 << 30


class Stream:
    """Work is done when it is given, so no stream waits for another one.

    Attributes:
        hangs: whether the device does not come to the end of what it is given from now on; who needs a number waits.
        waited_for: whether somebody does.
    """

    watch: ClassVar[Watch]
    hangs: ClassVar[bool] = False
    waited_for: ClassVar[bool] = False
    cuda_stream = stream_id = device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = this_device()

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return not self.hangs

    def synchronize(self) -> None:
        self.wait_for_all()
        self.watch.note("wait", "synchronize a stream")

    @classmethod
    def wait_for_all(cls) -> None:
        """What the host does until the device has done all it was given."""
        while cls.hangs:
            cls.waited_for = True
            time.sleep(0.01)
        cls.waited_for = False


class Event:
    """
    Attributes:
        alive: the events that somebody still holds.
    """

    alive: ClassVar[weakref.WeakSet[Event]] = weakref.WeakSet()

    def __init__(self, *_: Any, **__: Any) -> None:
        self.alive.add(self)
        self._time, self._done = 0.0, True

    def record(self, stream: Stream | None = None) -> None:
        self._time, self._done = time.perf_counter(), not Stream.hangs

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        self._done = self._done or not Stream.hangs
        return self._done

    def elapsed_time(self, other: Event) -> float:
        return (other._time - self._time) * 1e3

    def synchronize(self) -> None:
        Stream.watch.note("wait", "synchronize an event")


def patch_cuda(watch: Watch) -> None:
    """Give torch.cuda one H100 for each process of this host."""
    Stream.watch = watch
    stream = Stream()
    name = "NVIDIA H100 80GB HBM3"
    properties = SimpleNamespace(total_memory=GIGABYTES, major=9, minor=0, multi_processor_count=132, name=name)

    def nothing(*_: Any, **__: Any) -> None: ...

    def giving(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    fixed = {
        "is_available": True,
        "is_initialized": True,
        "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": this_device().index,
        "get_device_name": name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "get_arch_list": ["sm_90"],
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "current_stream": stream,
        "default_stream": stream,
        "mem_get_info": (GIGABYTES, GIGABYTES),
        "memory_stats": {},
        "memory_snapshot": [],
    }
    fixed |= dict.fromkeys(
        """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached
        max_memory_cached""".split(),
        1 << 20,
    )
    stubs: dict[str, Any] = {each: giving(value) for each, value in fixed.items()}
    for each in """init _lazy_init set_device set_stream manual_seed manual_seed_all seed reset_peak_memory_stats
            reset_max_memory_allocated reset_max_memory_cached ipc_collect _lazy_call""".split():
        stubs[each] = nothing

    def lock(address: int, size: int, *_: Any) -> int:
        registered[address] = size
        return 0

    def unlock(address: int) -> int:
        registered.pop(address, None)
        return 0

    locking = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=unlock)
    stubs |= {
        "cudart": lambda: locking,
        "check_error": nothing,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda _: nullcontext(),
        "device": lambda _: nullcontext(),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "synchronize": lambda *_: watch.note("wait", "synchronize the device"),
        "empty_cache": lambda: watch.note("wait", "empty_cache"),
    }
    for each, stub in stubs.items():
        setattr(torch.cuda, each, stub)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = nothing
    for kind in "Float Half BFloat16 Byte Int Long Double Bool".split():
        dtype = getattr(torch, f"{kind}Tensor").dtype if kind != "BFloat16" else torch.bfloat16
        setattr(torch.cuda, f"{kind}Tensor", lambda data, dtype=dtype: torch.tensor(data, dtype=dtype, device="cuda"))


def patch_collectives(watch: Watch) -> None:
    """Let gloo carry what is meant for NCCL."""
    distributed: Any = torch.distributed
    init = distributed.init_process_group

    def init_by_gloo(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init("gloo", *args, **kwargs)

    distributed.init_process_group = init_by_gloo
    for name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"):
        setattr(distributed, name, _through_the_device(watch, name, getattr(distributed, name)))
    work: Any = distributed.Work
    wait = work.wait

    def wait_for_gloo(*args: Any) -> Any:
        with watch.silent():  # it copies through memory of its own
            return wait(*args)

    work.wait = wait_for_gloo


def _through_the_device(watch: Watch, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Objects that NCCL carries: their bytes go to the device and back."""

    def carry(*args: Any, **kwargs: Any) -> Any:
        watch.note("wait", name)
        with watch.silent():
            return real(*args, **kwargs)

    return carry
